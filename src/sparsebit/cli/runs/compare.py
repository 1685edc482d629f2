"""The model of a run beside the float one: run time of their ONNX files, and a metric.

The files run in turn and the best round of each counts, so that other work on the machine costs both the same.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsebit.cli.inputs.inputs import example_of
from sparsebit.cli.inputs.objects import call, find_object
from sparsebit.cli.runs.other_work import OtherWork
from sparsebit.cli.runs.run import Run
from sparsebit.cli.terminal.output import InputError, one_line, say
from sparsebit.cli.terminal.progress import status
from sparsebit.errors import ExportError
from sparsebit.report.figures import busy

GUESSES = 16  # with fewer samples a top-1 has no meaning
HEARD = 8  # batches at most, for the SQNR
log = logging.getLogger("sparsebit")


def compare(run: Run, net: Any, small: Any, batches: list[Any], file: Path, metric: str | None) -> None:
    """The steps `sqnr`, `metric` and `latency`, where they are not finished and can be."""
    if not run.done("sqnr"):
        found = measure_sqnr(net, small, batches[:HEARD])
        if found is not None:
            run.finish("sqnr", **found)
    if not run.done("metric"):
        found = measure_metric(net, small, batches, metric)
        if found is not None:
            run.finish("metric", **found)
    if not run.done("latency") and run.done("export"):
        found = measure_latency(net, batches, file)
        if found is not None:
            run.finish("latency", **found)


def results(run: Run) -> dict[str, Any]:
    """The measured figures, for --json and for people."""
    steps = ("sqnr", "metric", "latency")
    return {step: run.about["steps"][step] for step in steps if run.done(step)}


def lines(result: Mapping[str, Any]) -> list[str]:
    found = []
    if "sqnr" in result:
        facts = result["sqnr"]
        db = float(facts["db"])
        if math.isfinite(db):
            noise = f"{db:.1f} dB"
        elif db > 0:
            noise = "exact"
        else:
            noise = "lost"
        found.append(f"SQNR         {noise} against float, on {facts['samples']} samples")
    if "metric" in result:
        facts = result["metric"]
        found.append(f"{facts['name']:<12} {facts['float']:.4g} -> {facts['new']:.4g}")
    if "latency" in result:
        facts = result["latency"]
        old = facts["milliseconds"]["float"]
        new = facts["milliseconds"]["new"]
        found.append(
            f"latency      {old:.3g} ms -> {new:.3g} ms in onnxruntime, batch of {facts['batch']}, "
            f"{facts['cores']} cores"
        )
        others = busy(facts.get("others"))
        found += [f"             {others}"] if others else []
        found += where_lines(facts)
    return found


def where_lines(facts: Mapping[str, Any]) -> list[str]:
    """The ops that take the time of the new file."""
    where = facts.get("where")
    if not where or not where["integer_time"]:  # a pruned model has no integers
        return []
    shares = (
        f"{where['integer_time']:.0%} of the time and {where['integer_macs']:.0%} of the MACs in integer kernels, "
        f"{where['borders']:.0%} of the time at their borders"
    )
    return [f"             {shares}"]


# -- noise -----------------------------------------------------------------------------------------------
def measure_sqnr(net: Any, small: Any, batches: list[Any]) -> dict[str, Any] | None:
    """Signal to noise of the outputs, against the float model's; None if these cannot be compared."""
    import torch
    from torch.utils import _pytree as pytree

    from sparsebit.cli.inputs.data import length
    from sparsebit.quantization.analysis.profile import Noise

    noise = Noise()
    with torch.no_grad(), status("comparing with the float model"):
        for batch in batches:
            real, new = (pytree.tree_leaves(_answer(model, batch)) for model in (runnable(net), small))
            shapes = ([getattr(x, "shape", None) for x in leaves] for leaves in (real, new))
            if len({tuple(map(str, found)) for found in shapes}) > 1:
                return None
            noise.add(new, real)
    if noise.signal:
        return {"db": noise.db, "samples": sum(map(length, batches))}
    return None


def runnable(net: Any) -> Any:
    """A module, also of an exported program."""
    from torch import export

    if isinstance(net, export.ExportedProgram):
        return net.module()
    return net


def _answer(model: Any, batch: Any) -> Any:
    example = example_of(model, batch)
    if isinstance(example, dict):
        return model(**example)
    return model(*example)


# -- latency ---------------------------------------------------------------------------------------------
def measure_latency(net: Any, batches: list[Any], file: Path) -> dict[str, Any] | None:
    """Milliseconds of the float file, which is written for this only, and of `file`; None if it cannot be."""
    example = example_of(net, batches[0])
    try:
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / "float.onnx"
            with status("writing the float model, to time it"):
                _write_float(net, batches[0], plain)
            with status("timing the float and the new file"):
                return best_times({"float": plain, "new": file}, example)
    except (ExportError, OSError) as error:  # a float file that cannot be written costs only its time
        log.info("no latency: %s", error)
        say(f"no latency: the float model cannot be written as ONNX: {one_line(error)}")
        return None


def _write_float(net: Any, batch: Any, path: Path) -> None:
    from torch import nn

    from sparsebit.cli.inputs.free_batch import free_batch
    from sparsebit.export.export_module import export_module, write_program

    if isinstance(net, nn.Module):
        batch, axes = free_batch(net, batch, quiet=True)
        export_module(net, example_of(net, batch), path, dynamic_axes=axes)
    else:  # an exported program, which has its sizes already
        write_program(net, path)


def best_times(files: Mapping[str, Path], example: Any) -> dict[str, Any]:
    """Milliseconds by name, on one sample where the files take batches of any size; and the ops that take the time."""
    from torch import Tensor
    from torch.utils import _pytree as pytree

    from sparsebit.export.certificate import timing
    from sparsebit.export.certificate.runtime import feeds, session

    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    sessions = {name: session(file) for name, file in files.items()}
    shapes = []
    for s in sessions.values():
        for i in s.get_inputs():
            shapes.append(i.shape)
    if shapes and all(shape and isinstance(shape[0], str) for shape in shapes):
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x[:1], (args, kwargs))
    given = {name: feeds(s, args, kwargs) for name, s in sessions.items()}
    others = OtherWork()
    best = timing.best_times(files, given)
    cores = others.cores()
    found = timing.Timing(best["new"], best["float"], *timing.profile(files["new"], given["new"]))
    first = next(iter(given["new"].values()), None)
    batch = len(first) if first is not None and first.ndim else 1
    where = found.as_dict(_why_float(files["new"]))
    return {
        "milliseconds": best,
        "batch": batch,
        "cores": len(_cores()),
        "machine": machine(),
        "others": cores,
        "where": where,
    }


def _why_float(file: Path) -> dict[str, str]:
    """The reasons that the export has written beside the file."""
    from sparsebit.export.files import report_of

    try:
        found: dict[str, str] = json.loads(report_of(file).read_text("utf-8")).get("why_float", {})
    except (OSError, ValueError):
        return {}
    return found


def _cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def machine() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


# -- metric ----------------------------------------------------------------------------------------------
def check_metric(spec: str | None) -> None:
    """Before any work: is it a function?"""
    if spec is not None and not callable(find_object(spec)):
        raise InputError(f"--metric {spec}: is not a function; write one that takes (model, batches)")


def measure_metric(net: Any, small: Any, batches: list[Any], spec: str | None) -> dict[str, Any] | None:
    """`spec(model, batches)` of both models, or the share of right labels where the batches have labels."""
    net = runnable(net)
    name = "top-1"
    samples = sum(len(y) for y in _labels(net, batches))
    if spec is not None:
        name = spec.rpartition(":")[2]
        samples = 0  # the function chooses its samples
    elif not samples:
        return None
    with status(f"measuring {name}"):
        values = [_value(spec, model, batches) for model in (net, small)]
    if values[0] is None or values[1] is None:
        return None
    if spec is None:
        _doubt(values[0], _classes(net, batches[0]), samples)
    return {"name": name, "float": values[0], "new": values[1], "samples": samples}


def _doubt(top1: float, classes: int, samples: int) -> None:
    """A float model that only guesses has seen other data in its training."""
    if samples >= GUESSES and top1 <= 1.5 * 100 / max(classes, 1):
        log.warning(
            "the float model itself has a top-1 of %.3g %%, about chance for %d classes: are the weights loaded "
            "(--weights), the inputs normalised as in training, and the labels in the same order?",
            top1,
            classes,
        )


def _classes(model: Any, batch: Any) -> int:
    import torch

    with torch.no_grad():
        return int(_answer(model, batch).shape[1])


def _value(spec: str | None, model: Any, batches: list[Any]) -> float | None:
    import torch

    with torch.no_grad():
        if spec is None:
            return _top1(model, batches)
        function = find_object(spec)
        found = call(f"--metric {spec}", lambda: function(model, batches))
    try:
        return float(found)
    except (TypeError, ValueError):
        raise InputError(f"--metric {spec}: gave a {type(found).__name__}; it must give a number") from None


def _labels(model: Any, batches: list[Any]) -> list[Any]:
    """The targets behind the inputs of a tuple: whole numbers, one per sample. [] if a batch has none."""
    import torch

    found = []
    for batch in batches:
        inputs = example_of(model, batch)
        rest: Any = ()
        if isinstance(batch, (tuple, list)) and isinstance(inputs, tuple):
            rest = batch[len(inputs) :]
        if len(rest) != 1 or not isinstance(rest[0], torch.Tensor) or rest[0].is_floating_point():
            return []
        if rest[0].dim() != 1 or len(rest[0]) != len(inputs[0]):
            return []
        found.append(rest[0])
    return found


def _top1(model: Any, batches: list[Any]) -> float | None:
    """The accuracy in per cent; None if the model gives no scores per class."""
    import torch

    right = count = 0
    for batch, labels in zip(batches, _labels(model, batches)):
        scores = model(*example_of(model, batch))
        if not isinstance(scores, torch.Tensor) or scores.dim() != 2 or len(scores) != len(labels):
            return None
        right += int((scores.argmax(1) == labels.to(scores.device)).sum())
        count += len(labels)
    return 100 * right / count
