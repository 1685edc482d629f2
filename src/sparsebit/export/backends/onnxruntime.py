"""onnxruntime: every rewrite here gives the same numbers and lets its optimiser find the integer kernels.

A kernel is integer if the op stands between DequantizeLinear and QuantizeLinear. So equal quantizers of one value
become one. A quantizer behind an op that only moves values also stands in front of it. ReLUs become part of the
quantizer behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from sparsebit.export.backends.base import BACKENDS, Backend, Problem
from sparsebit.export.kernels.integer_kernels import why_float
from sparsebit.export.onnx.marks import Mark, Marks
from sparsebit.numeric.spec import QuantSpec

ONNX_OPS = {  # how the exporter writes an op
    "*Conv[123]d*": "Conv",
    "ConvFunction": "Conv",
    "Conv1D": "Gemm",
    "*Linear*": "Gemm",
    "MatMul": "MatMul",
    "AddMM": "MatMul",
    "AddBMM": "MatMul",
    "AddMV": "MatMul",
    "*Attention": "MatMul",  # its two products
    "Add": "Add",
    "Mul": "Mul",
    "Concat": "Concat",
    "*AvgPool*": "AveragePool",
    "MaxPool*": "MaxPool",
    "LeakyReLU": "LeakyRelu",
    "Sigmoid": "Sigmoid",
    "HardSigmoid": "HardSigmoid",
    "Softmax": "Softmax",
}


@BACKENDS.register()
class OnnxruntimeBackend(Backend):
    TYPE = "onnxruntime"
    BITS = {"W": range(2, 9), "A": range(2, 9)}
    INTEGER_OPS = tuple(ONNX_OPS)
    ADVICE = "symmetric activations cost 1.3 to 2.3 x on x86: write A.QSCHEME: per-tensor-affine"

    def why_float(
        self,
        op: str,
        weight: QuantSpec | None,
        inputs: Sequence[QuantSpec],
        complete: bool = True,
        output: bool = True,
    ) -> str:
        onnx_op = next((name for pattern, name in ONNX_OPS.items() if fnmatchcase(op, pattern)), op)
        return why_float(onnx_op, weight, inputs, output, complete)

    def problems(self, mark: Mark) -> list[Problem]:
        if mark.spec.bits > 8 and mark.is_weight:
            reason = f"onnxruntime has no kernels for weights of {mark.spec.bits} bits"
            return [Problem(mark.name, reason, "W.QUANTIZER.BIT: 8, or export with backend='virtual'")]
        return []

    def lower(self, model: Any, marks: Marks) -> Any:
        from sparsebit.export.onnx import rewrites
        from sparsebit.export.onnx.bias import float_biases, integer_bias
        from sparsebit.export.onnx.channel_moves import shuffles_as_gathers
        from sparsebit.export.onnx.clips import absorb_clips
        from sparsebit.export.onnx.integer_forms import (
            hard_sigmoids_as_scales,
            large_pools_in_blocks,
            pointwise_as_products,
            pools_as_convs,
        )
        from sparsebit.export.onnx.packed_weights import packed_products
        from sparsebit.export.onnx.qdq import lower_marks

        # on x86, signed activations are slow, and onnxruntime 1.31 breaks some graphs of opset 21 that have them
        marks = {name: mark if mark.is_weight else mark.unsigned() for name, mark in marks.items()}
        rewrites.mean_to_pool(model)
        rewrites.gelu_order(model)
        rewrites.fold_pads(model)
        shuffles_as_gathers(model)
        aliases = rewrites.merge_equal(model, marks)
        while rewrites.hoist(model, marks) + absorb_clips(model, marks):
            aliases |= rewrites.merge_equal(model, marks)
        packed_products(model, marks)
        lowered = lower_marks(model, {name: mark for name, mark in marks.items() if name not in aliases})
        integer_bias(model, marks, lowered)
        rewrites.shapes_of_codes(model)
        rewrites.pads_of_codes(model, lowered)
        pointwise_as_products(model, lowered)
        rewrites.keep_apart(model)
        lowered.add_aliases(aliases)
        pools_as_convs(model)
        large_pools_in_blocks(model)
        hard_sigmoids_as_scales(model, lowered)
        float_biases(model, lowered)
        return lowered

    def speed_up(self, model: Any, marks: Marks) -> None:
        from sparsebit.export.onnx.float_weights import store_as_float

        store_as_float(model, marks)
