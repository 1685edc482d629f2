"""`sparsebit llm export`: a language model as a file of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsebit.cli import options
from sparsebit.cli.app import command
from sparsebit.cli.llm_options import Folder
from sparsebit.cli.terminal.output import InputError, show, show_error
from sparsebit.cli.terminal.progress import start, status
from sparsebit.errors import ReaderError


@command("llm export", "sparsebit llm export runs/w4 --gguf model.gguf --outtype q8_0")
def export(
    folder: Folder,
    gguf: Annotated[
        Path | None,
        typer.Option("--gguf", metavar="FILE", help="a GGUF file for llama.cpp", show_default=False),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="the tokenizer's folder, if it is another one", show_default=False),
    ] = None,
    outtype: Annotated[
        str, typer.Option(help="of float matrices: auto, f32, f16, bf16, q8_0, q4_0 or q4_1")
    ] = "auto",
    name: Annotated[
        str | None, typer.Option(help="what the file calls the model", show_default=False)
    ] = None,
    pre: Annotated[
        str | None,
        typer.Option(help="llama.cpp's name for the tokenizer's cuts, if it is unknown", show_default=False),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="take the place of an existing file")
    ] = False,
    json: options.Json = False,
) -> None:
    """Write a model, quantized or not, as one file with its tokenizer, for llama.cpp and its kin.

    Layers of 2, 3, 4 and 8 bits keep the codes that were solved, wherever a block of GGUF can hold them.
    """
    from sparsebit.cli.inputs.tokens import model_folder

    if gguf is None:
        raise InputError("--gguf: which file? name one, such as --gguf model.gguf")
    source = model_folder(folder)
    start()
    from sparsebit.llm.gguf import export_gguf

    words: dict[str, Any] = {"outtype": outtype, "name": name, "pre": pre, "overwrite": overwrite}
    try:
        with status("writing the GGUF file"):
            report = export_gguf(source, gguf, tokenizer, **words)
    except ReaderError as error:
        show({"ok": False, "path": str(gguf), "error": str(error)}, str(error.report), json)
        show_error(str(error))
        raise typer.Exit(1) from None
    show({"ok": True, **report.as_dict()}, str(report), json)
