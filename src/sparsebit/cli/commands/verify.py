"""`sparsebit verify`: does an ONNX file do what the model of its run does?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsebit.cli import options
from sparsebit.cli.app import command
from sparsebit.cli.runs.run import ABOUT, Run
from sparsebit.cli.terminal.output import InputError, show
from sparsebit.cli.terminal.progress import start, status


@command("verify", "sparsebit verify runs/w8a8/model.onnx")
def verify(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.onnx", help="the file, or the folder of a run", show_default=False),
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
    if file.is_dir():
        file = file_of(file)
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    folder = run or file.parent
    if run is None and not (folder / ABOUT).is_file():
        raise InputError(
            f"{file}: {folder} is not a folder of a run: it has no run.json; name the run with --run"
        )
    start()
    import sparsebit
    from sparsebit.cli.runs import steps
    from sparsebit.export.onnx.to_onnx import require

    require("onnx", "onnxscript", "onnxruntime")
    opened = Run.open(folder)
    steps.check_onnx(file)
    model, found, _ = steps.finished(opened)
    with status("running the file, comparing"):
        report = sparsebit.verify(file, model, found[:batches])
    show(report.as_dict(), str(report), json)
    return 0 if report.ok else 1


def file_of(folder: Path) -> Path:
    """The ONNX file of a run; of another folder, what to do instead."""
    from sparsebit.cli.runs.steps import ONNX

    if (folder / ONNX).is_file():
        return folder / ONNX
    if (folder / ABOUT).is_file():
        others = sorted(path.name for path in folder.glob("*.onnx"))
        advice = "write it with: sparsebit export"
        if others:
            advice = f"verify one of its files: {', '.join(others)}"
        raise InputError(f"{folder}: this run has no {ONNX}; {advice}")
    if (folder / "config.json").is_file():
        raise InputError(
            f"{folder}: holds a language model, no ONNX file; measure it with: sparsebit llm eval"
        )
    raise InputError(
        f"{folder}: is not a folder of a run: it has no run.json; name a file, and its run with --run"
    )
