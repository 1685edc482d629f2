"""`sparsebit llm eval`: the perplexity of a model on a text."""

from __future__ import annotations

from sparsebit.cli import options
from sparsebit.cli.app import command
from sparsebit.cli.llm_options import Folder, Length, Text
from sparsebit.cli.terminal.output import InputError, show
from sparsebit.cli.terminal.progress import start, status


@command("llm eval", "sparsebit llm eval runs/w4 --data test.txt")
def evaluate(
    folder: Folder,
    data: Text = None,
    length: Length = None,
    json: options.Json = False,
) -> None:
    """Measure the perplexity of a model, quantized or not, on a text; less is better."""
    import math

    from sparsebit.cli.inputs.tokens import check_tokens, load_model, model_folder, read_tokens

    source = model_folder(folder)
    if data is None:
        raise InputError("--data: perplexity of which text? give a .txt file, or an .npy file of tokens")
    start()
    from sparsebit.llm import perplexity
    from sparsebit.utils.progress import tracked

    with status("loading the model and the text"):
        tokens = read_tokens(data, source)
        model = load_model(source)
    if model.config.is_encoder_decoder:
        name = type(model).__name__
        raise InputError(
            f"{folder}: {name} reads one text and writes another; perplexity of one text is not defined"
        )
    length = check_tokens(data, tokens, model.config, length)
    rows = []
    for r in tokens.split(length) if tokens.dim() == 1 else tokens:
        if len(r) > 1:
            rows.append(r)
    total = sum(math.log(perplexity(model, r[None])) * (len(r) - 1) for r in tracked(rows, None, "measuring"))
    count = sum(len(r) - 1 for r in rows)
    value = math.exp(total / count)
    result = {"perplexity": value, "predicted": count, "length": length}
    show(result, f"perplexity   {value:.4g} over {count} tokens, sequences of {length}", json)
