"""One model of the zoo as an ONNX file: its certificate, and its integer kernels as pre-flight announced them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import zoo_shim
from torch import nn
from zoo_run import CONFIG, Case, joined, waken

from kernel_counts import announced, computed
from sparsebit.export.report import ExportReport
from sparsebit.quantization import QuantModel
from sparsebit.quantization.analysis.preflight import preflight

Differences = dict[str, tuple[int, int]]  # kind of kernel -> announced, in the file


@dataclass(frozen=True)
class Outcome:
    """What came out."""

    ok: bool
    differences: Differences | None  # None: the model has islands, which pre-flight cannot follow
    announced: dict[str, int]
    counted: dict[str, int]
    seconds: dict[str, float]  # step -> time
    report: ExportReport


def export(case: Case, folder: Path) -> Outcome:
    """The whole way of a user, with times."""
    zoo_shim.install()
    torch.manual_seed(0)
    batches = [case.batch(), case.batch()]
    times = [time.perf_counter()]
    model = _built(case, joined(*batches))
    times.append(time.perf_counter())
    qmodel = QuantModel(model, CONFIG, example=batches[0])
    qmodel.calibrate(batches, progress=False)
    qmodel.set_quant(w_quant=True, a_quant=True)
    times.append(time.perf_counter())
    found = preflight(qmodel, batches[0])
    times.append(time.perf_counter())
    report = qmodel.export_onnx(batches[0], str(folder / "model.onnx"), batches=batches[1:])
    times.append(time.perf_counter())
    expected, counted = announced(found), computed(report)
    wrapped = any(row.how == "no QModule" for row in found.rows)
    steps = ("build", "calibrate", "preflight", "export")
    return Outcome(
        ok=report.ok,
        differences=None if qmodel.islands else _differences(expected, counted, wrapped),
        announced=dict(expected),
        counted=dict(counted),
        seconds={step: round(b - a, 1) for step, a, b in zip(steps, times, times[1:])},
        report=report,
    )


def _built(case: Case, batch: object) -> nn.Module:
    model = waken(case.build(), batch)
    for part in model.modules():  # encoder and decoder have configs of their own
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False  # a file gives only tensors
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # a file has fixed sizes
    return model


def _differences(expected: dict[str, int], counted: dict[str, int], wrapped: bool) -> Differences:
    """Kinds whose counts differ; only integer ones where functions are wrapped: the float ops inside are not seen."""
    kinds = [kind for kind in {**expected, **counted} if kind.startswith("integer") or not wrapped]
    pairs = {kind: (expected.get(kind, 0), counted.get(kind, 0)) for kind in kinds}
    return {kind: (a, b) for kind, (a, b) in pairs.items() if a != b}
