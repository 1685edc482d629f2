"""tensorrt: symmetric int8 with zero point 0; what its parser refuses is refused here, with the reason.

Weights are int8 per tensor or per output channel, or int4 in blocks for matrix products; activations are int8 per
tensor; a bias stays float.
"""

from __future__ import annotations

from typing import Any

from sparsebit.errors import ExportError
from sparsebit.export.backends.base import BACKENDS, WEIGHTED, Backend, Problem
from sparsebit.export.onnx.marks import DOMAIN, Mark, Marks

INT4_BLOCKS = (64, 128)
PRESET = "start from the preset w8a8-tensorrt"


@BACKENDS.register()
class TensorrtBackend(Backend):
    TYPE = "tensorrt"
    BITS = {"W": (4, 8), "A": (8,)}
    SCHEMES = {"W": ("per-channel-symmetric", "per-tensor-symmetric"), "A": ("per-tensor-symmetric",)}
    INTEGER_OPS = (  # from its documentation: explicit quantization
        *(*WEIGHTED, "ConvTranspose[123]d", "MatMul", "AddMM", "Add", "*AvgPool*", "MaxPool*"),
    )

    def problems(self, mark: Mark) -> list[Problem]:
        letter = "W" if mark.is_weight else "A"
        found = []
        if not mark.spec.symmetric:
            scheme = "per-tensor-symmetric"
            if mark.is_weight:
                scheme = "per-channel-symmetric"
            found.append(
                Problem(
                    mark.name,
                    "TensorRT has no zero point and no uint8",
                    f"{letter}.QSCHEME: {scheme}, or {PRESET}",
                )
            )
        elif bool((mark.qparams.zero_point != 0).any()):
            found.append(Problem(mark.name, "its zero point is not 0", f"calibrate again, or {PRESET}"))
        if not mark.is_weight and mark.qparams.scale.numel() > 1:
            reason = "TensorRT takes one scale per activation tensor"
            found.append(Problem(mark.name, reason, "A.QSCHEME: per-tensor-symmetric"))
        blocked_int4 = mark.spec.bits == 4 and mark.spec.group in INT4_BLOCKS
        if mark.spec.group is not None and not blocked_int4:
            reason = f"TensorRT has no groups of {mark.spec.group} {mark.spec.bits}-bit weights"
            found.append(
                Problem(mark.name, reason, "W.GROUP: 64 or 128 with W.QUANTIZER.BIT: 4, or GROUP: null")
            )
        elif mark.spec.bits != 8 and not blocked_int4:
            kind = "weights of this kind" if mark.is_weight else "activations"
            reason = f"TensorRT has no {mark.spec.bits}-bit {kind}"
            fix = f"{letter}.QUANTIZER.BIT: 8 (4-bit weights only for Linear, in groups of 64 or 128)"
            found.append(Problem(mark.name, reason, fix))
        return found

    def lower(self, model: Any, marks: Marks) -> Any:
        from sparsebit.export.onnx import rewrites
        from sparsebit.export.onnx.packed_weights import packed_products
        from sparsebit.export.onnx.qdq import lower_marks

        aliases = rewrites.merge_equal(model, marks)
        _refuse_half_quantized_adds(model)
        _refuse_other_axes(model, marks)
        packed_products(model, marks)
        lowered = lower_marks(model, {name: mark for name, mark in marks.items() if name not in aliases})
        lowered.add_aliases(aliases)
        return lowered


def _refuse_half_quantized_adds(model: Any) -> None:
    """A residual Add runs in int8 only when both of its inputs are quantized."""
    from sparsebit.export.onnx.graph_edit import array_of, module_of

    for node in model.graph:
        if node.op_type != "Add" or any(array_of(v) is not None for v in node.inputs):
            continue
        marked = [v.producer() is not None and v.producer().domain == DOMAIN for v in node.inputs]
        if any(marked) and not all(marked):
            raise ExportError(
                f"{module_of(node)}: one input of its Add is quantized, the other is not; TensorRT would add them "
                f"in float\n  fix: A.QADD.ENABLE_QUANT: true"
            )


def _refuse_other_axes(model: Any, marks: Marks) -> None:
    """The scales of a weight lie along its output channels."""
    from sparsebit.export.onnx.graph_edit import marks_in, name_of, readers

    for node in marks_in(model):
        mark = marks.get(name_of(node))
        if mark is None or not mark.is_weight or mark.qparams.scale.numel() == 1 or mark.spec.group:
            continue
        for user in readers(node.outputs[0]):
            output = 1 if user.op_type == "ConvTranspose" else 0
            if user.op_type in ("Conv", "ConvTranspose", "Gemm", "Transpose") and mark.spec.axis != output:
                raise ExportError(
                    f"{mark.name}: its scales lie along axis {mark.spec.axis}, but TensorRT wants them along the "
                    f"output channels, axis {output}\n  fix: quantizer.set_ch_axis({output}), and calibrate again"
                )
