"""From a calibrated QuantModel to a certified ONNX file: mark, export, lower, run, compare."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ExportError
from sparsebit.export import files
from sparsebit.export.backends import BACKENDS, Backend
from sparsebit.export.calls import call_of, calls_of
from sparsebit.export.marks import Mark, emit
from sparsebit.export.report import ExportReport, settle
from sparsebit.export.to_onnx import require, to_onnx
from sparsebit.graph.feeding import signature_of
from sparsebit.graph.training import evaluating
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.quantizers import Mode, Quantizer


def export_onnx(
    qmodel: Any,
    dummy: Any,
    name: str | Path,
    *,
    backend: str | None = None,
    batches: Any = (),
    **options: Any,
) -> ExportReport:
    """Write `name` and its report beside it; the file is in its place only once it is certified."""
    from sparsebit.quantization.certifying import certify, second_opinion

    require("onnx", "onnxscript", "onnxruntime")
    path = files.writable(name)
    runtime: Backend = BACKENDS[backend or qmodel.cfg.backend]()
    marks = collect_marks(qmodel)
    refuse_problems(runtime, marks)
    signature = signature_of(qmodel)
    args, kwargs = call_of(dummy, signature, qmodel.device)
    extra_info = options.pop("extra_info", False)
    opset, reason = runtime.opset(marks, options.pop("opset_version", 13))
    with exporting(qmodel, _emitter(marks)):
        graph = to_onnx(qmodel.model, args, kwargs, opset, **options)
    lowered = runtime.lower(graph, marks)
    why = why_float_of(graph)
    finish(graph, marks, runtime, lowered)
    with files.drafting(path) as draft:
        files.write(graph, draft)
        calls, more = [(args, kwargs)], calls_of(batches, signature, qmodel.device)
        report = certify(qmodel, draft, calls, more, marks, lowered)
        if runtime.TYPE == "openvino":
            second_opinion(qmodel, draft, [*calls, *more], report)
        report.backend, report.opset, report.opset_reason = runtime.TYPE, opset, reason
        report.why_float = why
        settle(report, draft, path)
    if extra_info:
        from sparsebit.export.extra_info import write_extra

        write_extra(path)
    return report


def verify(onnx_path: str | Path, qmodel: Any, batches: Any) -> ExportReport:
    """Check a file again, later or on another machine: the same certificate, on `batches`."""
    require("onnx", "onnxscript", "onnxruntime")
    import onnx_ir as ir

    from sparsebit.export.lowered import Lowered
    from sparsebit.quantization.certifying import certify

    path = Path(onnx_path)
    if not path.is_file():
        raise ExportError(f"{path}: there is no such file")
    model = ir.load(path)
    if "sparsebit.lowered" not in model.metadata_props:
        ours = "sparsebit.certificate" in model.metadata_props
        what = "holds an ordinary model, not a quantized one" if ours else "was not written by Sparsebit"
        raise ExportError(f"{path}: {what}; export the model with qmodel.export_onnx()")
    lowered, marks = Lowered.of_file(model), collect_marks(qmodel)
    strange = sorted({site.name for site in lowered.sites} ^ set(marks))
    if strange:
        raise ExportError(f"{path}: was made from another model: {', '.join(strange[:5])} are not in both")
    calls = calls_of(batches, signature_of(qmodel), qmodel.device)
    report = certify(qmodel, path, calls, [], marks, lowered)
    report.path, report.bytes = str(path), files.size_of(path)
    report.backend, report.opset = model.metadata_props["sparsebit.backend"], model.opset_imports[""]
    report.opset_reason, report.why_float = "as written", why_float_of(model)
    return report


def _emitter(marks: Mapping[str, Mark]) -> Callable[[Quantizer, Tensor], Tensor]:
    """What a quantizer does while the model is traced: leave a mark. A rounded constant is one, however often read."""
    calls: Counter[str] = Counter()

    def mark(quantizer: Quantizer, x: Tensor) -> Tensor:
        name = quantizer.name
        if marks[name].is_weight:
            return emit(x, name, 0)
        calls[name] += 1
        return emit(quantizer.transform(x), name, calls[name])

    return mark


def collect_marks(qmodel: Any) -> dict[str, Mark]:
    """Every quantizer that is in use, with its grid as it is now."""
    marks: dict[str, Mark] = {}
    for path, module in quant_oprs(qmodel.model):
        for quantizer, weight in ((module.input_quantizer, None), (module.weight_quantizer, module.weight)):
            if quantizer is None or quantizer.absorbed or quantizer.unused:
                continue
            if not quantizer.calibrated:
                raise ExportError(
                    f"{quantizer.name} has no scale yet: calibrate the model before exporting it, for example with "
                    f"qmodel.calibrate(batches)"
                )
            value = None if weight is None else quantizer.transform(weight.detach())
            grid = quantizer.current_qparams()
            marks[quantizer.name] = Mark(quantizer.name, path, quantizer.spec, grid, value)
    return marks


def quant_oprs(gm: Any) -> Iterator[tuple[str, QuantOpr]]:
    """Every op with quantizers, and its path in the user's model."""
    seen: set[nn.Module] = set()
    for node in gm.graph.nodes:
        if node.op != "call_module":
            continue
        for inside, module in gm.get_submodule(str(node.target)).named_modules():
            if isinstance(module, QuantOpr) and module not in seen:
                seen.add(module)
                yield f"{node.meta.get('path', node.name)}.{inside.removeprefix('root.')}".strip("."), module


def refuse_problems(backend: Backend, marks: Mapping[str, Mark]) -> None:
    """What the runtime cannot hold is said before any work, all at once."""
    found = [problem for mark in marks.values() for problem in backend.problems(mark)]
    if found:
        more = f"\n... and {len(found) - 5} more" if len(found) > 5 else ""
        raise ExportError(f"{backend.TYPE} cannot hold this model:\n" + "\n".join(map(str, found[:5])) + more)


@contextmanager
def exporting(qmodel: Any, hook: Callable[[Quantizer, Tensor], Tensor]) -> Iterator[None]:
    """Every quantizer calls `hook` in place of rounding; flags and modes come back, also after an error."""
    quantizers = [m for m in qmodel.model.modules() if isinstance(m, Quantizer)]
    modes = [q.mode for q in quantizers]
    try:
        for q in quantizers:
            q.mode, q.on_export = Mode.EXPORT, hook
        with torch.no_grad(), evaluating(qmodel):
            yield
    finally:
        for q, mode in zip(quantizers, modes):
            q.mode, q.on_export = mode, None


@contextmanager
def with_bias(qmodel: Any, biases: Mapping[str, Any]) -> Iterator[None]:
    """Layers compute with the bias that the file has: rounded to the grid of input times weight."""
    saved: list[tuple[nn.Module, Any, Any]] = []
    try:
        for module in qmodel.model.modules():
            name = (
                module.weight_quantizer.name
                if isinstance(module, QuantOpr) and module.weight_quantizer
                else ""
            )
            if name not in biases:
                continue
            saved.append((module, module._parameters.get("bias"), module.bias_correction))
            bias = torch.from_numpy(biases[name].copy()).to(module.weight)
            module._parameters["bias"] = nn.Parameter(bias, requires_grad=False)
            module.bias_correction = None
        yield
    finally:
        for module, bias, correction in saved:
            module._parameters["bias"], module.bias_correction = bias, correction


def finish(graph: Any, marks: Mapping[str, Mark], backend: Backend, lowered: Any) -> None:
    """Drop what lowering left unused; write the quantizers into the file."""
    from sparsebit.export.graph_edit import clean

    clean(graph)
    bits = {name: int(mark.spec.bits) for name, mark in marks.items()}
    graph.metadata_props["sparsebit.backend"] = backend.TYPE
    graph.metadata_props["sparsebit.bits"] = json.dumps(bits, separators=(",", ":"))
    graph.metadata_props["sparsebit.lowered"] = lowered.to_json()


def why_float_of(graph: Any) -> dict[str, str]:
    from sparsebit.export.why_float import why_float

    return why_float(graph)
