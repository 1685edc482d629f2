"""The steps of runs, and how their results are loaded again; every step is a call of the library."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsebit.cli.inputs.free_batch import free_batch
from sparsebit.cli.inputs.inputs import example_of
from sparsebit.cli.runs.run import Run
from sparsebit.cli.terminal.output import InputError, one_line, say, show_error
from sparsebit.cli.terminal.progress import status
from sparsebit.errors import CalibrationError, ExportError, SparsebitError

WEIGHTS = "model.safetensors"
PLAN = "plan.json"
ONNX = "model.onnx"
FAILED = "failed_export"  # a key of run.json
COMPARED = 3  # batches on which an exported file is compared
log = logging.getLogger("sparsebit")


# -- quantized models ------------------------------------------------------------------------------------
def quantize(run: Run, model: Any, batches: list[Any], config: Any, trace: str) -> Any:
    """Quantize as `sparsebit.quantize` does, and save. An interrupted learning of the rounding is resumed the next
    time."""
    import sparsebit

    checkpoint = run.folder / "reconstruction"
    with of_data(run.inputs.data):
        qmodel = sparsebit.quantize(model, batches, config, trace=trace, checkpoint=checkpoint)
    hint_at_export(qmodel, trace)
    qmodel.save(run.folder)
    return qmodel


@contextmanager
def of_data(data: str | None) -> Iterator[None]:
    """An error about a batch gets the name of the data."""
    try:
        yield
    except CalibrationError as error:
        raise InputError(f"--data {data}: {error}") from error


def hint_at_export(qmodel: Any, trace: str) -> None:
    """Parts that torch.fx cannot trace are often no trouble for torch.export."""
    if qmodel.islands and trace == "fx":
        say("some parts could not be traced (see the warnings): --trace export may see inside them")


def load_quantized(run: Run, model: Any, batches: list[Any]) -> Any:
    from safetensors import SafetensorError

    from sparsebit.quantization import QuantModel

    try:
        trace = run.about["settings"]["trace"]
        return QuantModel.load(run.folder, model, example=batches[0], trace=trace)
    except (RuntimeError, SafetensorError) as error:  # other keys or shapes, a truncated file
        if isinstance(error, SparsebitError):
            raise
        raise InputError(f"{run.folder}: does not fit {run.inputs.model}: {one_line(error)}") from None


def describe(run: Run, qmodel: Any, example: Any) -> dict[str, Any]:
    """Write the files that the report reads: every op, histograms of the rounded values, the graph."""
    from sparsebit.cli.runs.facts import graph_of, histograms_of

    with status("looking at every layer"):
        layers = layers_of(qmodel, example)
        histograms = histograms_of(qmodel, example)
    run.write("layers.json", layers)
    run.write("histograms.json", histograms, indent=None)
    run.write("graph.json", graph_of(qmodel), indent=None)
    return layers


def layers_of(qmodel: Any, example: Any) -> dict[str, Any]:
    """The pre-flight report, and the range that each quantizer can hold."""
    from sparsebit.numeric.qparams import minmax_from_qparams

    ranges = {}
    for name, quantizer in qmodel.named_quantizers():
        low, high = minmax_from_qparams(quantizer.current_qparams(), quantizer.spec)
        ranges[name] = {
            "tensor": quantizer.cfg.letter,
            "bits": quantizer.bit,
            "scheme": str(quantizer.qdesc),
            "range": [float(low.min()), float(high.max())],
        }
    return {**qmodel.preflight(example).as_dict(), "quantizers": ranges}


# -- pruned models ---------------------------------------------------------------------------------------
def save_pruned(run: Run, small: Any) -> None:
    """plan.json has the channels that are kept (structured pruning only). The weights are those after pruning."""
    from safetensors.torch import save

    from sparsebit.utils.files import write_whole

    plan = getattr(small, "pruning_plan", None)
    if plan is not None:
        plan.save(run.folder / PLAN)
    state = {name: value.detach().cpu().clone().contiguous() for name, value in small.state_dict().items()}
    write_whole(run.folder / WEIGHTS, save(state))


def load_pruned(run: Run, model: Any, batches: list[Any]) -> Any:
    from sparsebit.cli.inputs.weights import load_weights
    from sparsebit.sparse.plan import Plan

    small = model
    if (run.folder / PLAN).is_file():
        small = Plan.load(run.folder / PLAN).apply(model, example_of(model, batches[0]))
    load_weights(small, run.inputs.model, run.folder / WEIGHTS)
    return small.eval()


def finished(run: Run) -> Any:
    """The model of a run, its batches, and the model that it was made from."""
    step = run.command
    if not run.done(step):
        raise InputError(f"{run.folder}: its {step} is not finished; repeat its command with --resume")
    model, batches = run.inputs.load()
    if run.command == "quantize":
        load = load_quantized
    else:
        load = load_pruned
    with status("loading the run"):
        return load(run, model, batches), batches, model


# -- ONNX ------------------------------------------------------------------------------------------------
def have_onnx() -> bool:
    from sparsebit.export.onnx.to_onnx import require

    try:
        require("onnx", "onnxscript", "onnxruntime")
    except ExportError as error:
        say(f"no ONNX file: {error}")
        return False
    return True


def write_onnx(
    model: Any,
    batches: list[Any],
    path: Path,
    fixed_batch: bool,
    backend: str | None = None,
    tune: bool = False,
) -> Any:
    """The ExportReport of a quantized or an ordinary model."""
    from sparsebit.export.export_module import export_module

    example, axes = (batches[0], None) if fixed_batch else free_batch(model, batches[0])
    # with their labels: these say where the classes are
    if example is batches[0]:
        more = batches[1:COMPARED]
    else:
        more = batches[:COMPARED]
    try:
        with status("writing the ONNX file, running it, comparing"):
            if hasattr(model, "export_onnx"):
                return model.export_onnx(
                    example, str(path), dynamic_axes=axes, backend=backend, batches=more, tune=tune
                )
            return export_module(model, example, path, dynamic_axes=axes, batches=more)
    except ExportError as error:
        if axes and "kept as" not in str(error):
            raise ExportError(
                f"{error}\n  a batch of any size may be the reason: try --fixed-batch"
            ) from error
        raise


def export_step(
    run: Run, model: Any, batches: list[Any], fixed_batch: bool, tune: bool = False
) -> dict[str, Any]:
    """The export of a run: skipped where it is done or cannot be; a failure costs only the file."""
    if run.done("export"):
        return {"ok": True, **run.about["steps"]["export"]}
    if not have_onnx():
        return {"ok": None}
    try:
        with run.step("export") as facts:
            report = write_onnx(model, batches, run.folder / ONNX, fixed_batch, tune=tune)
            if tune:  # layers of the model may be float now
                model.save(run.folder)
                describe(run, model, batches[0])
            facts.update(file=ONNX, bytes=report.bytes, certificate=certificate_lines(report))
    except ExportError as error:
        show_error(f"{error}\n  the rest of the run is finished; with --no-export there is no file to fail")
        log.info("export failed: %s", error)
        return note_failure(run, error)
    run.about.pop(FAILED, None)
    run.save()
    return {"ok": True, **run.about["steps"]["export"]}


def note_failure(run: Run, error: ExportError) -> dict[str, Any]:
    """Keep in run.json what the report page shows of a file that was refused."""
    report = getattr(error, "report", None)
    lines = [] if report is None else certificate_lines(report)
    failure = {"error": str(error), "certificate": lines}
    run.about[FAILED] = failure
    run.save()
    return {"ok": False, **failure}


def certificate_lines(report: Any) -> list[str]:
    """The report's own words, without the file's path."""
    return [line for line in str(report).splitlines() if not line.startswith("file ")]


def refresh_report(folder: Path) -> None:
    """Write report.html of a run from the files that it has now."""
    from sparsebit.report import render
    from sparsebit.utils.files import write_whole

    write_whole(folder / "report.html", render(folder).encode())


def check_onnx(path: Path) -> None:
    """The error of a file that onnx cannot read, in one line."""
    import onnx

    try:
        onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's own classes
        raise InputError(f"{path}: is broken or no ONNX file: {one_line(error)}") from None
