"""`sparsebit llm chat`: talk to a model."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from sparsebit.cli import options
from sparsebit.cli.app import command
from sparsebit.cli.llm_options import Folder
from sparsebit.cli.terminal.output import InputError, show
from sparsebit.cli.terminal.progress import status


@command("llm chat", 'sparsebit llm chat runs/w4 --prompt "Once upon a time"')
def chat(
    folder: Folder,
    prompt: Annotated[str | None, typer.Option(help="answer this, and end", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="of an answer")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token")] = 0.0,
    json: options.Json = False,
) -> None:
    """Let a model, quantized or not, continue a prompt; without --prompt, line by line until Ctrl-D."""
    from sparsebit.cli.inputs.tokens import load_model, load_tokenizer, model_folder

    source = model_folder(folder)
    if json and prompt is None:
        raise InputError("--json: needs a --prompt")
    with status("loading the model"):
        tokenizer = load_tokenizer(source)
        model = load_model(source)
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature}
    else:
        sampling = {"do_sample": False}
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
    if templated:
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    else:
        text = prompt
    given = tokenizer(text, return_tensors="pt", add_special_tokens=not templated)["input_ids"]
    if not given.numel():
        raise InputError("--prompt: has no tokens")
    if quiet:
        streamer = None
    else:
        streamer = TextStreamer(tokenizer, skip_prompt=bool(templated), skip_special_tokens=True)
    if tokenizer.pad_token_id is not None:
        pad = tokenizer.pad_token_id
    else:
        pad = tokenizer.eos_token_id
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            given, attention_mask=torch.ones_like(given), streamer=streamer, pad_token_id=pad, **ways
        )
    seconds = time.perf_counter() - start
    new = out[0, given.shape[1] :]
    answer = tokenizer.decode(new, skip_special_tokens=True)
    return {"prompt": prompt, "answer": answer, "tokens": len(new), "tokens_per_second": len(new) / seconds}


def _line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
