"""From a calibrated QuantModel to a certified ONNX file: mark, export, lower, run, compare."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ExportError
from sparsebit.export import files
from sparsebit.export.backends import BACKENDS, Backend
from sparsebit.export.backends.base import Problem
from sparsebit.export.calls import as_batches, call_of, calls_of, some_calls_of, target_shapes
from sparsebit.export.onnx.marks import Mark, emit
from sparsebit.export.onnx.to_onnx import require, to_onnx
from sparsebit.export.precision import float_copy, half_type, in_float, note_of
from sparsebit.export.report import UNCALIBRATED, ExportReport, settle
from sparsebit.graph.run.modes import evaluating
from sparsebit.graph.run.signature import signature_of
from sparsebit.numeric import QParams, fake_quantize
from sparsebit.numeric.pair_sums import needs_rule
from sparsebit.numeric.spec import channel_axis
from sparsebit.quantization.analysis.tuning import Tuning, time_draft
from sparsebit.quantization.certifying import Written, certify, second_opinion
from sparsebit.quantization.on_export import exporting, quant_oprs, used_quantizers
from sparsebit.quantization.quantizers import Quantizer

log = logging.getLogger("sparsebit")
# in the meta of a graph: what calibration/float_choice.py and trace/auto_trace.py chose
NOTES = ("float_forms", "float_attention", "ranges", "front_end")
UNREACHED = "sparsebit.unreached"  # metadata of a file: weights whose layers did not run on the dummy


@dataclass
class Draft:
    """A lowered graph that is not written yet, and the facts that the certificate needs."""

    graph: Any
    plain: Any  # the same graph without quantizers, where it is to be timed
    marks: dict[str, Mark]
    lowered: Any
    unreached: list[str]  # quantizers of layers that did not run on the dummy
    why_float: dict[str, str]
    opset: int
    opset_reason: str


@dataclass(frozen=True)
class Request:
    """How a graph is made."""

    runtime: Backend
    opset: int  # the lowest that the user accepts
    extra_info: bool
    keeps_plain: bool  # the graph without quantizers is needed too, to be timed
    options: dict[str, Any]  # those of torch's exporter


def export_onnx(
    qmodel: Any,
    dummy: Any,
    name: str | Path,
    *,
    backend: str | None = None,
    batches: Any = (),
    timing: bool = False,
    tune: bool = False,
    **options: Any,
) -> ExportReport:
    """Write `name` and its report beside it; the file is in its place only once it is certified."""
    require("onnx", "onnxscript", "onnxruntime")
    path = files.writable(name)
    batches = as_batches(batches)
    kind = half_type(qmodel)
    if kind is not None:
        qmodel = _in_float(qmodel, dummy, kind)
        dummy = in_float(dummy)
        batches = in_float(batches)
    runtime: Backend = BACKENDS[backend or qmodel.cfg.backend]()
    if tune and runtime.TYPE != "onnxruntime":
        raise ExportError(
            f"tune: measures in onnxruntime, and the file is for {runtime.TYPE}; leave tune out"
        )
    extra_info = options.pop("extra_info", False)
    opset = options.pop("opset_version", 13)
    request = Request(runtime, opset, extra_info, timing or tune, options)
    with unit_scales(qmodel) as uncalibrated:
        if uncalibrated:
            log.warning("%s: %s", path, UNCALIBRATED)
        signature = signature_of(qmodel)
        call = call_of(dummy, signature, qmodel.device)

        def draft() -> Draft:
            return draft_of(qmodel, request, call, uncalibrated)

        tuned = Tuning(qmodel, draft, call).run() if tune else None
        made = draft()
        with files.drafting(path) as file:
            files.write(made.graph, file)
            more = calls_of(batches, signature, qmodel.device)
            targets = target_shapes([dummy, *batches], signature)
            written = Written(file, made.marks, made.lowered, runtime.TYPE)
            report = certify(qmodel, written, [call], more, targets)
            if runtime.TYPE == "openvino":
                second_opinion(qmodel, file, [call, *more], report)
            report.uncalibrated = uncalibrated
            if kind is not None:
                report.notes.append(note_of(kind))
            if not uncalibrated:
                report.notes += unreached_note(made)
            describe(report, qmodel, runtime, made)
            if timing or tune:
                report.timing = time_draft(made, file, call)
            if tuned is not None:
                report.notes.append(tuned)
            settle(report, file, path)
    if extra_info:
        from sparsebit.export.onnx.extra_info import write_extra

        write_extra(path)
    return report


def describe(report: ExportReport, qmodel: Any, runtime: Backend, made: Draft) -> None:
    """Add the facts about the file to the report of its certificate."""
    report.backend = runtime.TYPE
    report.opset = made.opset
    report.opset_reason = made.opset_reason
    report.why_float = made.why_float
    if runtime.TYPE == "onnxruntime":
        report.pair_rule = pair_rule_of(qmodel)
    report.notes += [qmodel.model.meta[key] for key in NOTES if key in qmodel.model.meta]


def unreached_note(made: Draft) -> list[str]:
    """A note about quantizers that are not in the file, or none."""
    if not made.unreached:
        return []
    shown = ", ".join(made.unreached[:3])
    if len(made.unreached) > 3:
        shown += " ..."
    return [f"not in the file, because the dummy does not reach them: {shown}"]


def draft_of(qmodel: Any, request: Request, call: tuple[Any, Any], uncalibrated: bool) -> Draft:
    """The graph of the model in its present state, lowered for the runtime of the request."""
    from sparsebit.export.onnx.graph_edit import without_marks

    runtime = request.runtime
    marks = collect_marks(qmodel)
    refuse_problems(runtime, marks)
    opset, reason = runtime.opset(marks, request.opset)
    emitter = Emitter(marks)
    with exporting(qmodel, emitter):
        graph = to_onnx(qmodel.model, *call, opset, **request.options)
    unreached = sorted(set(marks) - set(emitter.calls) - names_in(graph))
    if not uncalibrated:  # then calibration has shown that activations get float data
        unreached = [name for name in unreached if marks[name].is_weight]
    marks = {name: mark for name, mark in marks.items() if name not in unreached}
    plain = None
    if request.keeps_plain:
        plain = without_marks(graph)
    lowered = runtime.lower(graph, marks)
    if not request.extra_info:
        runtime.speed_up(graph, marks)
    why = why_float_of(graph)
    finish(graph, marks, runtime, lowered)
    graph.metadata_props[UNREACHED] = json.dumps(unreached)
    return Draft(graph, plain, marks, lowered, unreached, why, opset, reason)


def _in_float(qmodel: Any, dummy: Any, kind: torch.dtype) -> Any:
    """A copy in float32, which runs on the dummy in float32."""
    found = float_copy(qmodel)
    args, kwargs = call_of(in_float(dummy), signature_of(found), found.device)
    try:
        with torch.no_grad(), evaluating(found):
            found.model(*args, **kwargs)
    except Exception as error:  # the user's code in another dtype may raise anything
        raise ExportError(
            f"model: is {kind}, in which onnxruntime has no integer kernels, and its graph does not run in float32: "
            f"{type(error).__name__}: {str(error)[:300]}\n"
            f"  fix: quantize a copy in float32, copy.deepcopy(model).float(), on batches in float32"
        ) from error
    return found


def verify(onnx_path: str | Path, qmodel: Any, batches: Any) -> ExportReport:
    """Check a file again, later or on another machine: the same certificate, on `batches`."""
    require("onnx", "onnxscript", "onnxruntime")
    batches = as_batches(batches)
    kind = half_type(qmodel)
    if kind is not None:
        qmodel = float_copy(qmodel)
        batches = in_float(batches)
    import onnx_ir as ir

    from sparsebit.export.onnx.lowered import Lowered

    path = Path(onnx_path)
    model = files.read(path, ir.load)
    if "sparsebit.lowered" not in model.metadata_props:
        ours = "sparsebit.certificate" in model.metadata_props
        what = "was not written by Sparsebit"
        if ours:
            what = "holds an ordinary model, not a quantized one"
        raise ExportError(f"{path}: {what}; export the model with qmodel.export_onnx()")
    try:
        lowered = Lowered.of_file(model)
        marks = collect_marks(qmodel)
    except FileNotFoundError as error:
        raise ExportError(
            f"{path}: its numbers are in {error.filename}, which is missing; keep both in one folder"
        ) from error
    for name in json.loads(model.metadata_props.get(UNREACHED, "[]")):
        marks.pop(name, None)
    strange = sorted({site.name for site in lowered.sites} ^ set(marks))
    if strange:
        raise ExportError(f"{path}: was made from another model: {', '.join(strange[:5])} are not in both")
    signature = signature_of(qmodel)
    calls = some_calls_of(batches, signature, qmodel.device)
    backend = model.metadata_props["sparsebit.backend"]
    targets = target_shapes(batches, signature)
    report = certify(qmodel, Written(path, marks, lowered, backend), calls, [], targets)
    report.path = str(path)
    report.bytes = files.size_of(path)
    report.backend = backend
    report.opset = model.opset_imports[""]
    report.opset_reason = "as written"
    report.why_float = why_float_of(model)
    if backend == "onnxruntime":
        report.pair_rule = pair_rule_of(qmodel)
    else:
        report.pair_rule = ""
    report.notes += [] if kind is None else [note_of(kind)]
    return report


class Emitter:
    """The work of a quantizer during an export: it leaves a mark. A rounded constant gets one mark for all its
    readers."""

    def __init__(self, marks: Mapping[str, Mark]):
        self.marks = marks
        self.calls: Counter[str] = Counter()

    def __call__(self, quantizer: Quantizer, x: Tensor) -> Tensor:
        name = quantizer.name
        self.calls[name] += 1
        if self.marks[name].is_weight:
            return emit(x, name, 0)
        return emit(quantizer.transform(x), name, self.calls[name])


def collect_marks(qmodel: Any) -> dict[str, Mark]:
    """Every quantizer that is in use, with its present grid."""
    marks: dict[str, Mark] = {}
    for path, quantizer, weight in used_quantizers(qmodel):
        if not quantizer.calibrated:
            raise ExportError(
                f"{quantizer.name} has no scale yet: calibrate the model before exporting it, for example with "
                f"qmodel.calibrate(batches)"
            )
        if weight is None:
            value = None
        else:
            value = exported_weight(quantizer, weight.detach())
        grid = quantizer.current_qparams()
        marks[quantizer.name] = Mark(quantizer.name, path, quantizer.spec, grid, value)
    return marks


def exported_weight(quantizer: Quantizer, weight: Tensor) -> Tensor:
    """The weight that the file rounds: under the pair rule, its values are rounded already."""
    if quantizer.keeps_pairs:
        return quantizer.rounded(weight)
    return quantizer.transform(weight)


@torch.no_grad()
def pair_rule_of(qmodel: Any) -> str:
    """A text: the number of weights that follow the pair rule, and the increase of their rounding error."""
    weights = [(q, w) for _, q, w in used_quantizers(qmodel) if w is not None and needs_rule(q.spec)]
    ruled = [(q, w) for q, w in weights if q.pair_rule]
    if not ruled:
        summed = [m.weight_quantizer for _, m in quant_oprs(qmodel.model) if m.sums_pairs]
        needed = any(quantizer is not None and needs_rule(quantizer.spec) for quantizer in summed)
        off = needed and not qmodel.cfg.w.pair_rule
        if off:
            return "off (W.PAIR_RULE: false): sums are exact only on ARM and on x86 with VNNI"
        return ""
    noise = plain = 0.0
    for quantizer, weight in ruled:
        wanted = quantizer.transform(weight).float()
        observer = quantizer.observer
        noise += float((quantizer.rounded(weight).float() - wanted).square().sum())
        grid = QParams(*observer.calc_qparams_with_minmax(observer.min_val, observer.max_val))
        if torch.isfinite(grid.scale).all():
            plain += float((fake_quantize(wanted, grid, quantizer.spec) - wanted).square().sum())
    price = ""
    if noise and plain:
        price = f", {10 * math.log10(noise / plain):+.1f} dB of rounding error"
    return f"{len(ruled)} weights{price}: sums are exact on every x86"


@contextmanager
def unit_scales(qmodel: Any) -> Iterator[bool]:
    """Inside the block, an uncalibrated model has scale 1 and zero point 0 everywhere; yields True for such a model.

    A model with some scales keeps them: `collect_marks` refuses it.
    """
    found = list(used_quantizers(qmodel))
    if not found or any(quantizer.calibrated for _, quantizer, _ in found):
        yield False
        return
    saved = [(quantizer, quantizer.scale, quantizer.zero_point) for _, quantizer, _ in found]
    try:
        for _, quantizer, weight in found:
            if weight is None:
                count = 1
            else:
                count = scale_count(quantizer, weight)
            for name, value in (("scale", 1.0), ("zero_point", 0.0)):
                old = getattr(quantizer, name)
                new = torch.full((count,), value, device=old.device)
                setattr(quantizer, name, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
        yield True
    finally:
        for quantizer, scale, zero_point in saved:
            quantizer.scale = scale
            quantizer.zero_point = zero_point


def scale_count(quantizer: Quantizer, weight: Tensor) -> int:
    """The number of scales that calibration would give a weight."""
    spec = quantizer.spec
    if spec.group is not None:
        return weight.numel() // spec.group
    axis = channel_axis(weight.dim(), spec.axis)
    return 1 if axis is None else weight.shape[axis]


def refuse_problems(backend: Backend, marks: Mapping[str, Mark]) -> None:
    """Refuse, before any work, a model that the runtime cannot hold; the error lists all problems."""
    found: list[Problem] = []
    for mark in marks.values():
        found.extend(backend.problems(mark))
    if found:
        more = ""
        if len(found) > 5:
            more = f"\n... and {len(found) - 5} more"
        raise ExportError(f"{backend.TYPE} cannot hold this model:\n" + "\n".join(map(str, found[:5])) + more)


def finish(graph: Any, marks: Mapping[str, Mark], backend: Backend, lowered: Any) -> None:
    """Drop what lowering left unused; write the quantizers into the file."""
    from sparsebit.export.onnx.graph_edit import clean

    clean(graph)
    bits = {name: int(mark.spec.bits) for name, mark in marks.items()}
    graph.metadata_props["sparsebit.backend"] = backend.TYPE
    graph.metadata_props["sparsebit.bits"] = json.dumps(bits, separators=(",", ":"))
    graph.metadata_props["sparsebit.lowered"] = lowered.to_json()


def names_in(graph: Any) -> set[str]:
    """The quantizers that left a mark in an exported graph."""
    from sparsebit.export.onnx.graph_edit import marks_in, name_of

    return {name_of(node) for node in marks_in(graph)}


def why_float_of(graph: Any) -> dict[str, str]:
    from sparsebit.export.kernels.why_float import why_float

    return why_float(graph)
