"""The torch side of the certificate: the model computes again, on the values that the runtime had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsebit.export.certificate import openvino_runtime, runtime
from sparsebit.export.certificate.end_to_end import (
    AS_USERS_RUN_IT,
    BARE,
    EndToEnd,
    Shape,
    answers,
    rounding_of,
)
from sparsebit.export.certificate.local_output import LocalOutput
from sparsebit.export.certificate.op_rounding import OpsRoundOtherwise
from sparsebit.export.certificate.optimised_graph import first_wrong_tensor
from sparsebit.export.certificate.quantized_model import Certificate, QuantizerCheck
from sparsebit.export.certificate.runtime import Array
from sparsebit.export.onnx.marks import Mark
from sparsebit.export.report import ExportReport
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.modes import evaluating
from sparsebit.numeric import fake_quantize
from sparsebit.quantization.modules import Opr, quant_mode
from sparsebit.quantization.on_export import exporting, quant_oprs, with_bias
from sparsebit.quantization.quantizers import Quantizer

if TYPE_CHECKING:
    from sparsebit.export.onnx.lowered import Bias

NBITS = (
    "MatMulNBits rounds its input to 8 bits; the session option session.qdq_matmulnbits_accuracy_level = 1 computes "
    "in float"
)
DRAWS = 2  # of float rounding
HALF_A_STEP = 0.51  # the model rounds a bias to the same grid, or not at all
ELSEWHERE = (
    "compared in onnxruntime with optimisations off, because the file is for another runtime; the line "
    "`in onnxruntime` is a plain session, which does not decide here; for onnxruntime itself export with "
    "BACKEND: onnxruntime"
)


@dataclass(frozen=True)
class Written:
    """A file, with the marks of the quantizers in it, and their places after lowering."""

    file: Path
    marks: Mapping[str, Mark]
    lowered: Any
    backend: str = "onnxruntime"


def certify(
    qmodel: Any, written: Written, calls: list[Call], more: list[Call], targets: Sequence[Shape] = ()
) -> ExportReport:
    """Run a file and compare it with the model: on `calls` quantizer by quantizer, on `more` only end to end."""
    file = written.file
    certificate = Certificate(rounding=rounding_of(qmodel))
    certificate.see_targets(targets)
    check_biases(qmodel, written, certificate)
    for call in calls:
        check_locally(qmodel, written, call, certificate)
    is_for_onnxruntime = written.backend == "onnxruntime"
    integer, floating = runtime.kernels(file)
    certificate.rounds_inputs = bool(integer["MatMulNBits"])
    if is_for_onnxruntime:
        certificate.session = AS_USERS_RUN_IT
    else:
        certificate.session = BARE
    plain = check_end_to_end(qmodel, file, [*calls, *more], certificate, is_for_onnxruntime)
    if is_for_onnxruntime and certificate.output_failures() and not certificate.local_failures():
        certificate.start = first_wrong_tensor(file, [*calls, *more])
    described = {name: mark.describe() for name, mark in written.marks.items()}
    report = ExportReport("", "", 0, "", 0, certificate, described, integer, dict(floating))
    report.notes += certificate.remarks()
    if not is_for_onnxruntime:
        report.others["onnxruntime"] = plain
        report.notes.append(ELSEWHERE)
    if integer["MatMulNBits"]:
        report.notes.append(NBITS)
    return report


def second_opinion(qmodel: Any, file: Path, calls: list[Call], report: ExportReport) -> None:
    """The end-to-end comparison in OpenVINO too, where it is installed."""
    if not openvino_runtime.installed():
        report.notes.append("openvino is not installed: the file was run in onnxruntime only")
        return
    other = report.others["openvino"] = EndToEnd()
    run = openvino_runtime.OpenvinoSession(file)
    with quantized(qmodel):
        for args, kwargs in calls:
            expected = runtime.torch_outputs(qmodel.model(*args, **kwargs))
            other.add(output_names(file), expected, runtime.run(run, runtime.feeds(run, args, kwargs)))


def check_locally(qmodel: Any, written: Written, call: Call, certificate: Certificate) -> None:
    """(a): one forward of the model in which every quantizer returns the value of the runtime in its place."""
    names = []
    for sites in written.lowered.by_name().values():
        for site in sites:
            names += [name for name in (site.before, site.after) if name]
    values = runtime.run_bare(written.file, names, *call)
    answer = replayed(qmodel, written, call, values, certificate)

    def rounded_otherwise() -> list[list[Array]]:
        found = []
        for seed in range(DRAWS):
            with OpsRoundOtherwise(seed):
                again = replayed(qmodel, written, call, values, Certificate())
                found.append(runtime.torch_outputs(again))
        return found

    found = {name: values[name] for name in output_names(written.file)}
    check_outputs(answer, found, certificate, rounded_otherwise)


def replayed(
    qmodel: Any, written: Written, call: Call, values: Mapping[str, Array], certificate: Certificate
) -> Any:
    """The answer of the model on the values of the runtime; the certificate records how the quantizers compare."""
    sites = written.lowered.by_name()
    calls: Counter[str] = Counter()

    def replay(quantizer: Quantizer, x: Tensor) -> Tensor:
        name = quantizer.name
        mark = written.marks[quantizer.name]
        check = certificate.quantizers.setdefault(name, QuantizerCheck(name))
        if not calls[name] and name not in certificate.order:
            certificate.order.append(name)
        site = sites[name][min(calls[name], len(sites[name]) - 1)]
        calls[name] += 1
        if mark.weight is not None:
            expected = fake_quantize(mark.weight.float(), mark.qparams, mark.spec)
            found = values[site.after]
            if site.transposed and found.size == expected.numel():  # a convolution of 1 x 1 may be a matrix
                found = found.T.reshape(expected.shape)
            stored = torch.from_numpy(found.copy()).to(expected)
            check.codes += expected.numel()
            if stored.shape != expected.shape:
                check.wrong += expected.numel()
                return expected.to(x)
            check.wrong += int((stored != expected).sum())
            return stored.to(x)
        return check.compare(mark, quantizer.transform(x), values[site.before], values[site.after], site)

    args, kwargs = call
    with exporting(qmodel, replay), with_bias(qmodel, written.lowered.bias):
        return qmodel.model(*args, **kwargs)


def check_outputs(
    answer: Any,
    found: Mapping[str, Array],
    certificate: Certificate,
    rounded_otherwise: Callable[[], list[list[Array]]],
) -> None:
    """The outputs of (a), each by itself: their number, their types, their values, and those of their quiet parts."""
    tensors = [t for t in pytree.tree_leaves(answer) if torch.is_tensor(t)]
    if len(tensors) != len(found):
        certificate.output_count = f"{len(found)}; the model has {len(tensors)}"
        return
    moved = cache(rounded_otherwise)  # two more forwards: only where something is not equal at once
    for i, (tensor, expected, name) in enumerate(zip(tensors, runtime.torch_outputs(answer), found)):
        array = found[name]
        wanted = str(tensor.dtype).removeprefix("torch.")
        if str(array.dtype) != wanted:
            certificate.output_types[name] = f"{array.dtype}; the model's is {wanted}"
        if array.shape != expected.shape:
            certificate.output_types[name] = f"of shape {array.shape}; the model's is {expected.shape}"
            continue
        others = lambda i=i: [draw[i] for draw in moved()]
        whole = certificate.local_outputs.setdefault(name, LocalOutput())
        whole.compare(expected, array, certificate.rounding, others)
        for part in certificate.parts.of(name, expected):
            check = certificate.local_parts.setdefault(part.name_in(name), LocalOutput())
            check.compare_part(part, expected, array, certificate.rounding, others)


def check_biases(qmodel: Any, written: Written, certificate: Certificate) -> None:
    """The biases of the file against the model's, before the model computes with them in (a)."""
    marks = written.marks
    lowered = written.lowered
    scales = []
    for m in marks.values():
        if not m.is_weight and m.qparams.scale.numel() == 1:
            scales.append(m.qparams.scale.item())
    with quantized(qmodel):
        for _, module in quant_oprs(qmodel.model):
            name = ""
            if module.weight_quantizer is not None:
                name = module.weight_quantizer.name
            # a weight of an LSTM has no separate bias
            has_bias = name in lowered.bias and hasattr(module, "bias")
            own = module.current_bias if has_bias else None
            if own is not None:
                weight_scale = runtime.as_array(marks[name].qparams.scale)
                wrong = wrong_values(lowered.bias[name], runtime.as_array(own), weight_scale, scales)
                certificate.wrong_biases[name] = wrong


def wrong_values(bias: Bias, own: Array, weight_scale: Array, input_scales: list[float]) -> int:
    """Count the values of a bias that differ from the model's; all of them, if its grid is not input times weight."""
    input_scale = bias.step / np.resize(weight_scale, bias.step.shape)
    is_on_grid = any(np.allclose(input_scale, scale, rtol=1e-6, atol=0) for scale in input_scales)
    if own.shape != bias.values.shape or not is_on_grid:
        return own.size
    rounding = np.finfo(np.float32).eps * np.abs(own)
    is_right = np.abs(own - bias.values) <= HALF_A_STEP * bias.step + rounding
    return int((~is_right).sum())


def output_names(file: Path) -> list[str]:
    import onnx

    return [o.name for o in onnx.load(str(file), load_external_data=False).graph.output]


def check_end_to_end(
    qmodel: Any, file: Path, calls: list[Call], certificate: Certificate, is_for_onnxruntime: bool
) -> EndToEnd:
    """(b) the file against the model, the model against itself with its input moved, and against the float model.

    Returns the comparison in a plain session. For onnxruntime it decides; else the one with optimisations off does.
    """
    gm = qmodel.model
    layers = [m for m in gm.modules() if isinstance(m, Opr)]
    loaded = runtime.session(file, optimised=is_for_onnxruntime)
    plain = certificate.runtime
    as_loaded = loaded
    if not is_for_onnxruntime:
        as_loaded = runtime.session(file)
        plain = EndToEnd(targets=certificate.runtime.targets)
    names = [output.name for output in loaded.get_outputs()]
    with quantized(qmodel):
        for call, (expected, got, moved) in zip(calls, answers(gm, loaded, calls, layers)):
            certificate.runtime.add(names, expected, got)
            if not is_for_onnxruntime:
                plain.add(names, expected, runtime.run(as_loaded, runtime.feeds(as_loaded, *call)))
            certificate.add_moved(names, expected, moved)
            with quant_mode(gm):
                floating = runtime.torch_outputs(call.run(gm))
            certificate.quantization.add(names, floating, expected)
    return plain


@contextmanager
def quantized(qmodel: Any) -> Iterator[None]:
    """The mode in which the model is compared."""
    with torch.no_grad(), evaluating(qmodel), quant_mode(qmodel.model, w=True, a=True):
        yield
