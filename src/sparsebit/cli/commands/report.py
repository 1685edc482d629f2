"""`sparsebit report`: a page about a run."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from sparsebit.cli import options
from sparsebit.cli.app import app
from sparsebit.cli.terminal.output import InputError, show


class Format(str, Enum):
    html = "html"
    md = "md"
    json = "json"


@app.command(epilog="Example: sparsebit report runs/w8a8")
def report(
    run: options.Run,
    style: Annotated[Format, typer.Option("--format", help="a page, Markdown, or plain facts")] = Format.html,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="report.* of the run, if left out")
    ] = None,
    json: options.Json = False,
) -> None:
    """Write a report of a run: headline, layers, error per layer, certificate. One file, no network needed."""
    from sparsebit.report import render
    from sparsebit.utils.files import write_whole

    text = render(run, style.value)
    path = output or run / f"report.{style.value}"
    if output is not None and path.exists():
        raise InputError(f"{path}: is there already; name another file with --output")
    write_whole(path, text.encode())
    show({"file": str(path), "bytes": len(text.encode())}, f"wrote {path}", json)
