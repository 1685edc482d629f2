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
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.onnx", help="the file, or the folder of its run", show_default=False),
    ],
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="its run; the folder of the file, if left out")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="batches of the run's data to compare on")] = 3,
    json: options.Json = False,
) -> int:
    """Compare a file with the model of its run again: every quantizer, every op, and the outputs.

    Of a pruned model, the outputs. Exit code 1 if the certificate does not hold.
    """
    file = _file(file)
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


def _file(path: Path) -> Path:
    """The ONNX file; of a folder, the one that its run wrote."""
    from sparsebit.cli.work import ONNX

    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(f"{path}: no such file; name the ONNX file, or the folder of its run")
    if (path / ONNX).is_file():
        return path / ONNX
    others = sorted(p.name for p in path.glob("*.onnx") if not p.name.endswith(".failed.onnx"))
    what = f"it has {', '.join(others)}: name one" if others else f"`sparsebit export {path}` writes one"
    raise InputError(f"{path}: is a folder without a {ONNX}; {what}")
