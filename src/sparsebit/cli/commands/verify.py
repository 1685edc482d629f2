"""`sparsebit verify`: does an ONNX file do what the model of its run does?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsebit.cli import options
from sparsebit.cli.app import app
from sparsebit.cli.output import InputError, show
from sparsebit.cli.progress import start, status


@app.command(epilog="Example: sparsebit verify runs/w8a8/model.onnx")
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE.onnx", help="the file", show_default=False)],
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="its run; the folder of the file, if left out")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="batches of the run's data to compare on")] = 3,
    json: options.Json = False,
) -> int:
    """Compare a file with the model of its run again: every quantizer, every op, and the outputs.

    Of a pruned model, the outputs. Exit code 1 if the certificate does not hold.
    """
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    start()
    import sparsebit
    from sparsebit.cli import work
    from sparsebit.cli.run import Run
    from sparsebit.export.to_onnx import require

    require("onnx", "onnxscript", "onnxruntime")
    opened = Run.open(run or file.parent)
    work.check_onnx(file)
    model, found, _ = work.finished(opened)
    with status("running the file, comparing"):
        report = sparsebit.verify(file, model, found[:batches])
    show(report.as_dict(), str(report), json)
    return 0 if report.ok else 1
