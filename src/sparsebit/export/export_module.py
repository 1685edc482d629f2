"""Any nn.Module, pruned or not, to an ONNX file that has been run and agrees with it.

Every output is compared with torch's: the largest difference, as a share of the largest value, is at most float
rounding or what the model's own output moves by when its input moves by 1e-5 (end_to_end.py).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import ExportError
from sparsebit.export import files
from sparsebit.export.calls import as_batches, call_of, calls_of, some_calls_of, target_shapes
from sparsebit.export.certificate import runtime
from sparsebit.export.certificate.end_to_end import (
    Comparison,
    Rows,
    Shape,
    answers,
    check_output,
    check_part,
    rounding_of,
)
from sparsebit.export.certificate.first_difference import first_difference
from sparsebit.export.certificate.runtime import Array
from sparsebit.export.onnx.to_onnx import quiet, require, to_program
from sparsebit.export.onnx.types import exporter_opset
from sparsebit.export.precision import float_copy, half_type, in_float, note_of
from sparsebit.export.report import ExportReport, settle
from sparsebit.graph.run.calls import Call, device_of
from sparsebit.graph.run.modes import evaluating

BFLOAT16 = (torch.bfloat16,)  # float16 stays: without quantizers onnxruntime computes in it
QUIET_SIZE = 1e-2  # of the largest value: smaller parts of an output round like values of this size
LOUD = 1e-2  # a noise floor above this lets much pass


@dataclass
class OutputCheck:
    """One output, over all batches: the largest differences, as shares of the largest value."""

    error: float = 0.0  # the file's
    floor: float = 0.0  # the model's own, its input moved

    def allowed(self, rounding: float) -> float:
        if math.isfinite(self.floor):
            return max(rounding, self.floor)
        return rounding


@dataclass
class PlainCertificate(Comparison):
    """The comparisons of an ordinary model with its file, and their result."""

    outputs: dict[str, OutputCheck] = field(default_factory=dict)
    # parts that the rest of an output would drown
    quiet: dict[str, OutputCheck] = field(default_factory=dict)
    start: str = ""  # of a file that differs: the first value that does

    def add(
        self, names: Sequence[str], expected: list[Array], got: list[Array], moved: list[list[Array]]
    ) -> float:
        """One batch; returns its largest error."""
        self.runtime.add(names, expected, got)
        self.add_moved(names, expected, moved)
        if len(expected) != len(got):
            self.outputs[f"count ({len(got)}, the model has {len(expected)})"] = OutputCheck(math.inf)
            return math.inf
        worst = 0.0
        for name, mine, theirs, *others in zip(names, expected, got, *moved):
            check = self.outputs.setdefault(name, OutputCheck())
            error = check_output([mine], [theirs])
            check.error = max(check.error, error)
            check.floor = max(check.floor, *(check_output([mine], [other]) for other in others))
            worst = max(worst, error, self._add_parts(name, mine, theirs, others))
        return worst

    def _add_parts(self, name: str, mine: Array, theirs: Array, others: list[Array]) -> float:
        worst = 0.0
        for part in self.parts.of(name, mine):
            check = self.quiet.setdefault(part.name_in(name), OutputCheck())
            error, *floors = (check_part(part, mine, found, QUIET_SIZE) for found in (theirs, *others))
            check.error = max(check.error, error)
            check.floor = max(check.floor, *floors)
            worst = max(worst, error)
        return worst

    def failures(self) -> list[str]:
        wrong = []
        for name, check in {**self.outputs, **self.quiet}.items():
            if check.error > (allowed := check.allowed(self.rounding)):
                wrong.append(
                    f"the output {name}: off by {check.error:.2g} of the largest value, {allowed:.2g} is allowed"
                )
        return [self.start, *wrong] if wrong and self.start else wrong

    def remarks(self) -> list[str]:
        found: list[str] = []
        for name, check in self.outputs.items():
            if check.floor > LOUD:
                found.append(
                    f"the output {name} moves by {check.floor:.2g} of its largest value when the input moves by 1e-5: "
                    f"the file cannot be held to less than that"
                )
        return found

    def as_dict(self) -> dict[str, Any]:
        found = {}
        for name, check in self.outputs.items():
            found[name] = {"error": check.error, "allowed": check.allowed(self.rounding)}
        return {"outputs": found, **super().as_dict()}

    def rows(self) -> Rows:
        found = []
        for name, check in list(self.outputs.items())[:8]:
            found.append(
                ("output", f"{name}: within {check.error:.1e}, {check.allowed(self.rounding):.1e} is allowed")
            )
        return found


def export_module(
    model: nn.Module,
    dummy: Any,
    name: str | Path = "model.onnx",
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Any = None,
    opset_version: int = 13,
    verbose: bool = False,
    *,
    dynamic_shapes: Any = None,
    batches: Any = (),
) -> ExportReport:
    """Write an ONNX file that has been run and agrees with `model`, and its report beside it.

    dummy          arguments of the forward: a tensor, a tuple, a dict of keyword arguments.
    dynamic_axes   `{"input": {0: "batch"}}` as in the old exporter, or dynamic_shapes as in torch.export.
    opset_version  the least opset; torch's exporter writes 18 or more.
    batches        more inputs to compare the file and the model on.

    The model is exported in eval mode; afterwards its mode is restored. A file that differs is kept as
    <name>.failed.onnx, and ExportError names the place where it starts to differ.
    """
    require("onnx", "onnxscript", "onnxruntime")
    from sparsebit.export.onnx.graph_edit import clean

    path = files.writable(name)
    opset, reason = exporter_opset(opset_version)
    _check_model(model)
    more = as_batches(batches)
    kind = half_type(model, BFLOAT16)
    if kind is not None:
        model = float_copy(model)
        dummy = in_float(dummy)
        more = in_float(more)
    signature = inspect.signature(model.forward)
    device = device_of(model)
    call = call_of(dummy, signature, device)
    with torch.no_grad(), evaluating(model):
        _check_runs(model, call)
        program = to_program(
            model, *call, opset, input_names, output_names, dynamic_axes, dynamic_shapes, verbose
        )
        clean(program.model)
        with files.drafting(path) as draft:
            files.write(program.model, draft)
            calls = [call, *calls_of(more, signature, device)]
            targets = target_shapes([dummy, *more], signature)
            certificate = certify(model, program.exported_program, draft, calls, targets)
            notes = certificate.remarks() + ([] if kind is None else [note_of(kind)])
            report = ExportReport("", "", opset, reason, 0, certificate, notes=notes)
            settle(report, draft, path)
    return report


def write_program(program: Any, path: str | Path) -> None:
    """An ExportedProgram as ONNX, for measurements: it is not compared with anything."""
    require("onnx", "onnxscript", "onnxruntime")
    try:
        with quiet():
            found = torch.onnx.export(program, dynamo=True)
    except Exception as error:  # torch.onnx's own errors, and whatever its decompositions raise
        raise ExportError(f"program: torch's exporter gives up: {type(error).__name__}: {error}") from error
    files.write(found.model, Path(path))  # type: ignore[union-attr]


def verify_module(onnx_path: str | Path, model: nn.Module, batches: Any) -> ExportReport:
    """Run a file of `export_module` again, later or on another machine: the same certificate, on `batches`."""
    require("onnx", "onnxscript", "onnxruntime")
    import onnx

    path = Path(onnx_path)
    proto = files.read(path, lambda path: onnx.load(str(path), load_external_data=False))
    told = {prop.key for prop in proto.metadata_props}
    if "sparsebit.certificate" not in told or "sparsebit.lowered" in told:
        what = "was not written by Sparsebit"
        if "sparsebit.lowered" in told:
            what = "holds a quantized model"
        raise ExportError(
            f"{path}: {what}; compare it with the QuantModel that it was made from, or export again"
        )
    _check_model(model)
    batches = as_batches(batches)
    kind = half_type(model, BFLOAT16)
    if kind is not None:
        model = float_copy(model)
        batches = in_float(batches)
    signature = inspect.signature(model.forward)
    calls = some_calls_of(batches, signature, device_of(model))
    with torch.no_grad(), evaluating(model):
        certificate = certify(model, None, path, calls, target_shapes(batches, signature))
    opset = next(found.version for found in proto.opset_import if not found.domain)
    notes = certificate.remarks() + ([] if kind is None else [note_of(kind)])
    return ExportReport(str(path), "", opset, "as written", files.size_of(path), certificate, notes=notes)


def certify(
    model: nn.Module, program: Any, file: Path, calls: list[Call], targets: Sequence[Shape] = ()
) -> PlainCertificate:
    """Run the file as users do, and compare; of one that differs, find the first value of `program` that does."""
    certificate = PlainCertificate(rounding=rounding_of(model))
    certificate.see_targets(targets)
    loaded = runtime.session(file)
    names = [output.name for output in loaded.get_outputs()]
    leaves = [m for m in model.modules() if not list(m.children())]
    errors = [certificate.add(names, *found) for found in answers(model, loaded, calls, leaves)]
    if certificate.failures() and program is not None:
        worst = calls[max(range(len(calls)), key=errors.__getitem__)]
        certificate.start = first_difference(model, program, file, worst, certificate.rounding)
    return certificate


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise ExportError(f"model: expected an nn.Module that is not scripted, got {type(model).__name__}")


def _check_runs(model: nn.Module, call: Call) -> None:
    """A dummy that the model cannot take, or answers that no file could give, are no fault of the exporter."""
    try:
        first = call.run(model)
        second = call.run(model)
    except Exception as error:  # the user's forward may raise anything
        reason = f"{type(error).__name__}: {str(error)[:600]}"
        raise ExportError(f"dummy: the model does not run on it: {reason}") from error
    for place, leaf in pytree.tree_flatten_with_path(first)[0]:
        if leaf is not None and not isinstance(leaf, Tensor):
            where = pytree.keystr(place)
            raise ExportError(f"model: its output{where} is {leaf!r:.40}, but a file gives only tensors")
    expected = runtime.torch_outputs(first)
    if not any(np.isfinite(array).any() for array in expected):
        raise ExportError(
            "dummy: the model's outputs have no finite value for it, so there is nothing to compare"
        )
    if check_output(expected, runtime.torch_outputs(second)) > rounding_of(model):
        raise ExportError(
            "model: answers the same input differently each time, so no file can be compared with it\n"
            "  fix: no random numbers in eval mode, and no state that a forward leaves behind"
        )
