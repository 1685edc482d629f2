"""`sparsebit llm quantize`: a language model, named by its folder, becomes a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsebit.cli import options
from sparsebit.cli.app import command
from sparsebit.cli.llm_options import Data, Folder, Length, keywords_of, with_table
from sparsebit.cli.terminal.output import InputError, Interrupted, show, show_error
from sparsebit.cli.terminal.progress import start, status
from sparsebit.errors import ReaderError


@command("llm quantize", "sparsebit llm quantize models/llama --data text.txt --bits 4 -o runs/w4")
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

    The model is read block by block, so it need not fit into memory. The method decides the options that you leave out.
    """
    from sparsebit.cli.inputs.tokens import model_folder
    from sparsebit.cli.runs.run import again

    source = model_folder(folder)
    keywords = keywords_of(given)
    _check_output(output, resume)
    start()
    from sparsebit import llm as library

    if data is None:
        batches = None
    else:
        batches = _batches(source, data, samples, length)
    try:
        report = library.quantize(source, batches, save=output, **keywords)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; finished blocks are kept. Resume with:\n  {again()}") from None
    except ReaderError as error:
        show({"ok": False, "folder": str(output), "error": str(error)}, str(error.report), json)
        show_error(str(error))
        raise typer.Exit(1) from None
    facts = {"average_bits": report.average_bits, "stored_bits": report.stored_bits, "layers": report.layers}
    facts["measured"] = report.measured.facts() if report.measured else None
    facts |= {"warning": report.warning, "readers": [row.facts() for row in report.readers]}
    result = {"ok": True, "folder": str(output), "seconds": report.seconds, **facts}
    show(result, f"{report}\nwritten to   {output}", json)


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
    if config.is_encoder_decoder:
        return in_halves(found)
    return found


def _check_output(folder: Path, resume: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output {folder}: is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not resume:
        raise InputError(f"--output {folder}: is not empty; name a new folder, or resume it with --resume")
