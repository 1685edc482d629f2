"""`sparsebit llm`: quantize a language model by its folder, measure its perplexity, talk to it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsebit.cli import options
from sparsebit.cli.app import app
from sparsebit.cli.llm_options import keywords_of, with_table
from sparsebit.cli.terminal.output import InputError, Interrupted, show, show_error
from sparsebit.cli.terminal.progress import start, status
from sparsebit.errors import ReaderError

llm = typer.Typer(no_args_is_help=True, help="Quantize, measure and try language models.")
app.add_typer(
    llm, name="llm", epilog="Example: sparsebit llm quantize models/llama --data text.txt -o runs/w4"
)

Folder = Annotated[
    str, typer.Argument(metavar="DIR", help="a model as transformers saves it", show_default=False)
]
Text = Annotated[
    str | None,
    typer.Option("--data", metavar="FILE", help="a .txt file, or an .npy file of tokens", show_default=False),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="FILE",
        help="a .txt file, an .npy file of tokens, or an .npz file of a processor's batch (or a folder of them)",
        show_default=False,
    ),
]
Length = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="tokens of a sequence; the usual number is 512, or what the model was made for",
        show_default=False,
    ),
]


@llm.command(epilog="Example: sparsebit llm quantize models/llama --data text.txt --bits 4 -o runs/w4")
@with_table
def quantize(
    folder: Folder,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="a new folder", show_default=False)
    ],
    data: Data = None,
    samples: Annotated[int, typer.Option(min=1, help="sequences of the data that are used")] = 128,
    length: Length = None,
    resume: options.Resume = False,
    json: options.Json = False,
    **given: Any,
) -> None:
    """Quantize the decoder blocks of a language model, and write a checkpoint that others load.

    The model is read block by block, so it need not fit into memory. What is not said is decided by the method.
    """
    from sparsebit.cli.inputs.tokens import model_folder
    from sparsebit.cli.runs.run import again

    source = model_folder(folder)
    keywords = keywords_of(given)
    _check_output(output, resume)
    start()
    from sparsebit import llm as library

    batches = None if data is None else _batches(source, data, samples, length)
    try:
        report = library.quantize(source, batches, save=output, **keywords)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; finished blocks are kept. Go on with:\n  {again()}") from None
    except ReaderError as error:
        show({"ok": False, "folder": str(output), "error": str(error)}, str(error.report), json)
        show_error(str(error))
        raise typer.Exit(1) from None
    facts = {"average_bits": report.average_bits, "stored_bits": report.stored_bits, "layers": report.layers}
    facts["measured"] = report.measured.facts() if report.measured else None
    facts |= {"warning": report.warning, "readers": [row.facts() for row in report.readers]}
    result = {"ok": True, "folder": str(output), "seconds": report.seconds, **facts}
    show(result, f"{report}\nwritten to   {output}", json)


@llm.command("eval", epilog="Example: sparsebit llm eval runs/w4 --data test.txt")
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
    from sparsebit.graph.feeding import tracked
    from sparsebit.llm import perplexity

    with status("loading the model and the text"):
        tokens, model = read_tokens(data, source), load_model(source)
    if model.config.is_encoder_decoder:
        name = type(model).__name__
        raise InputError(
            f"{folder}: {name} reads one text and writes another; perplexity of one text is not defined"
        )
    length = check_tokens(data, tokens, model.config, length)
    rows = [r for r in (tokens.split(length) if tokens.dim() == 1 else tokens) if len(r) > 1]
    total = sum(math.log(perplexity(model, r[None])) * (len(r) - 1) for r in tracked(rows, None, "measuring"))
    count = sum(len(r) - 1 for r in rows)
    value = math.exp(total / count)
    result = {"perplexity": value, "predicted": count, "length": length}
    show(result, f"perplexity   {value:.4g} over {count} tokens, sequences of {length}", json)


@llm.command(epilog='Example: sparsebit llm chat runs/w4 --prompt "Once upon a time"')
def chat(
    folder: Folder,
    prompt: Annotated[str | None, typer.Option(help="answer this, and end", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="of an answer")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token")] = 0.0,
    json: options.Json = False,
) -> None:
    """Let a model, quantized or not, go on with a prompt; without --prompt, line by line until Ctrl-D."""
    from sparsebit.cli.inputs.tokens import load_model, load_tokenizer, model_folder

    source = model_folder(folder)
    if json and prompt is None:
        raise InputError("--json: needs a --prompt")
    with status("loading the model"):
        tokenizer, model = load_tokenizer(source), load_model(source)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    ways = {"max_new_tokens": max_tokens, **sampling}
    if prompt is not None:
        result = _answer(model, tokenizer, prompt, ways, quiet=json)
        if json:
            show(result, "", json)
        return
    while (line := _line()) is not None:
        if line.strip():
            _answer(model, tokenizer, line, ways, quiet=False)


def _answer(model: Any, tokenizer: Any, prompt: str, ways: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """Printed while it comes, unless `quiet`; by the chat template of the model where it has one."""
    import torch
    from transformers import TextStreamer

    templated = getattr(tokenizer, "chat_template", None)
    message = [{"role": "user", "content": prompt}]
    text = (
        tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        if templated
        else prompt
    )
    given = tokenizer(text, return_tensors="pt", add_special_tokens=not templated)["input_ids"]
    if not given.numel():
        raise InputError("--prompt: has no tokens")
    streamer = (
        None if quiet else TextStreamer(tokenizer, skip_prompt=bool(templated), skip_special_tokens=True)
    )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            given, attention_mask=torch.ones_like(given), streamer=streamer, pad_token_id=pad, **ways
        )
    seconds, new = time.perf_counter() - start, out[0, given.shape[1] :]
    answer = tokenizer.decode(new, skip_special_tokens=True)
    return {"prompt": prompt, "answer": answer, "tokens": len(new), "tokens_per_second": len(new) / seconds}


def _line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _batches(folder: Path, data: str, samples: int, length: int | None) -> list[Any]:
    from transformers import AutoConfig

    from sparsebit.cli.inputs.objects import call
    from sparsebit.cli.inputs.tokens import (
        check_tokens,
        in_halves,
        is_batches,
        read_batches,
        read_tokens,
        windows,
    )

    if is_batches(data):
        return read_batches(data, samples)
    with status("reading the text"):
        tokens = read_tokens(data, folder)
    config = call(str(folder), lambda: AutoConfig.from_pretrained(folder))
    found = windows(tokens, check_tokens(data, tokens, config, length), samples)
    return in_halves(found) if config.is_encoder_decoder else found


def _check_output(folder: Path, resume: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output {folder}: is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not resume:
        raise InputError(f"--output {folder}: is not empty; name a new folder, or go on with --resume")
