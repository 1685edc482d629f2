"""`sparsebit export`: the ONNX file of a saved run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsebit.cli import options
from sparsebit.cli.app import command
from sparsebit.cli.terminal.output import InputError, show, show_error
from sparsebit.cli.terminal.progress import start
from sparsebit.errors import ExportError


@command("export", "sparsebit export runs/w8a8 --backend openvino --output openvino.onnx")
def export(
    run: options.Run,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="model.onnx of the run, if left out")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="see: sparsebit list backends")] = None,
    fixed_batch: options.FixedBatch = False,
    json: options.Json = False,
) -> int:
    """Write the model of a run as ONNX, run the file, and compare.

    Exit code 1 if it could not be written, or does not do what the model does.
    """
    from sparsebit.cli.runs import compare, steps
    from sparsebit.cli.runs.run import Run

    opened = Run.open(run)
    start()
    from sparsebit.export.backends import BACKENDS
    from sparsebit.export.files import writable
    from sparsebit.export.onnx.to_onnx import require

    path = output or run / steps.ONNX
    if path.exists():
        raise InputError(f"{path}: already exists; name another file with --output")
    if backend is not None and backend not in BACKENDS:
        raise InputError(f"--backend {backend}: no such backend{BACKENDS.hint(backend)}")
    if backend is not None and opened.command != "quantize":
        raise InputError("--backend: only quantized models are written for a backend; leave it out")
    require("onnx", "onnxscript", "onnxruntime")
    writable(path)
    model, batches, net = steps.finished(opened)
    try:
        report = steps.write_onnx(model, batches, path, fixed_batch, backend)
    except ExportError as error:
        show_error(str(error))
        if output is None:
            steps.note_failure(opened, error)
            steps.refresh_report(run)
        if json:
            show({"ok": False, "error": str(error)}, "", json)
        return 1
    if output is None:
        opened.about.pop(steps.FAILED, None)
        lines = steps.certificate_lines(report)
        opened.finish("export", file=steps.ONNX, bytes=report.bytes, certificate=lines)
        compare.compare(opened, net, model, batches, path, opened.about["settings"].get("metric"))
        steps.refresh_report(run)
    show(report.as_dict(), str(report), json)
    return 0
