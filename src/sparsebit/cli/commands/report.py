"""`sparsebit report`: a page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsebit.cli import options
from sparsebit.cli.app import command
from sparsebit.cli.terminal.output import InputError, show
from sparsebit.report import FORMATS, render
from sparsebit.utils.files import write_whole

Style = Annotated[
    str, typer.Option("--format", metavar=f"[{'|'.join(FORMATS)}]", help="see: sparsebit list report-formats")
]


@command("report", "sparsebit report runs/w8a8")
def report(
    run: options.Run,
    style: Style = "html",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="report.* of the run, if left out")
    ] = None,
    json: options.Json = False,
) -> None:
    """Write a report of a run: headline, layers, error per layer, certificate. One file, no network needed."""
    text = render(run, style)
    path = output or run / f"report.{style}"
    if output is not None and path.exists():
        raise InputError(f"{path}: already exists; name another file with --output")
    write_whole(path, text.encode())
    show({"file": str(path), "bytes": len(text.encode())}, f"wrote {path}", json)
