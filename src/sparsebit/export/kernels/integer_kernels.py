"""Does onnxruntime compute an op, with these grids, in integers? Placement, pre-flight and biases ask here.

Measured with onnxruntime 1.31.1 (CPU), one Q/DQ graph per op, reading the optimised graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsebit.export.kernels.wrong_kernels import is_wrong
from sparsebit.numeric.spec import QuantSpec

# ops of ONNX that have an integer kernel -> is it used only if the output is quantized, too?
NEEDS_OUTPUT = {
    "Conv": True,
    "Gemm": False,
    "MatMul": False,
    "Add": True,
    "Mul": True,
    "Concat": True,
    "AveragePool": True,
    "GlobalAveragePool": True,
    "MaxPool": False,
    "LeakyRelu": True,
    "Sigmoid": True,
    "HardSigmoid": True,  # as a change of scale (integer_forms.py)
    "Softmax": True,
}
WEIGHT_BITS = range(5, 9)  # stored in types of 8 bits (export/onnx/types.py)
INPUT_BITS = range(2, 9)
OUTPUT = "its output is not quantized"
WRONG = "its integer kernel in onnxruntime computes wrong values"


def why_float(
    op: str, weight: QuantSpec | None, inputs: Sequence[QuantSpec], output: bool, complete: bool = True
) -> str:
    """The reason why `op`, an op of ONNX, is computed in float; empty: it is computed in integers.

    weight    the grid of its constant operand, if it has one.
    inputs    the grids of its other operands.
    output    everything that reads its output quantizes it, and on the same grid.
    complete  no operand is float.
    """
    if op not in NEEDS_OUTPUT:
        return "no integer kernel"
    if op == "Softmax" and is_wrong("QLinearSoftmax"):
        return WRONG
    if not complete or (weight is None and not inputs):
        return "an operand is float"
    return why_float_grids(weight, inputs) or (OUTPUT if NEEDS_OUTPUT[op] and not output else "")


def why_float_grids(weight: QuantSpec | None, inputs: Sequence[QuantSpec]) -> str:
    """The reason why values on these grids are dequantized before an op; empty: their codes are multiplied."""
    operands = [(spec, INPUT_BITS) for spec in inputs] + ([] if weight is None else [(weight, WEIGHT_BITS)])
    for spec, allowed in operands:
        if spec.bits >= allowed.stop:
            return f"{spec.bits} bits"
        if spec.bits not in allowed:
            return f"{spec.bits}-bit values are stored, then computed in float"
    if any(spec.axis is not None for spec in inputs):
        return "its input has a scale per channel"
    if weight is not None and weight.group is not None:
        return "a group of weights has a scale: they are dequantized"
    return ""
