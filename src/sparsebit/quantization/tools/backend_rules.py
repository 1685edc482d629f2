"""What each backend computes in integers. Data and one pure function.

onnxruntime: export/integer_kernels.py knows, which placement asks too. TensorRT and OpenVINO: from their documentation
(explicit quantization; low precision transformations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sparsebit.export.integer_kernels import why_float
from sparsebit.numeric.spec import QuantSpec


@dataclass(frozen=True)
class BackendRules:
    """Ops are names as the pre-flight table shows them (`Conv2d`, `AdaptiveAvgPool2d`), as fnmatch patterns."""

    integer: tuple[str, ...]  # have an integer kernel
    symmetric: bool = False  # zero points must be 0
    slow_symmetric: str = ""  # advice, where activations without a zero point are slow


ONNX_OPS = {  # how the exporter writes an op
    "*Conv[123]d*": "Conv",
    "ConvFunction": "Conv",
    "Conv1D": "Gemm",
    "*Linear*": "Gemm",
    "MatMul": "MatMul",
    "AddMM": "MatMul",
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
WEIGHTED = ("*Conv[123]d*", "Conv1D", "ConvFunction", "*Linear*")
RULES: dict[str, BackendRules] = {
    "onnxruntime": BackendRules(
        integer=tuple(ONNX_OPS),
        slow_symmetric="symmetric activations cost 1.3 to 2.3 x on x86: write A.QSCHEME: per-tensor-affine",
    ),
    "tensorrt": BackendRules(
        integer=(*WEIGHTED, "ConvTranspose[123]d", "MatMul", "AddMM", "Add", "*AvgPool*", "MaxPool*"),
        symmetric=True,
    ),
    "openvino": BackendRules(
        integer=(
            *(*WEIGHTED, "ConvTranspose[123]d", "MatMul", "AddMM", "Add", "Mul", "Concat"),
            *("*AvgPool*", "MaxPool*", "PReLU", "Upsample", "Interpolate", "Mean"),
        ),
    ),
}


def verdict(
    backend: str,
    op: str,
    weight: QuantSpec | None,
    inputs: Sequence[QuantSpec],
    complete: bool = True,
    output: bool = True,
) -> tuple[bool, str]:
    """Does `backend` compute `op` in integers? If not, why.

    weight, inputs  the grids of everything it reads that is quantized.
    complete        all of its operands are quantized.
    output          everything that reads its output quantizes it, and on the same grid.
    """
    rules = RULES.get(backend)
    if rules is None:
        return False, "simulated in float"
    if backend == "onnxruntime":
        onnx_op = next((name for pattern, name in ONNX_OPS.items() if fnmatchcase(op, pattern)), op)
        why = why_float(onnx_op, weight, inputs, output, complete)
    else:
        why = _why_float(rules, op, [*inputs, *([] if weight is None else [weight])], complete)
    return not why, why or "integers"


def _why_float(rules: BackendRules, op: str, specs: Sequence[QuantSpec], complete: bool) -> str:
    if not any(fnmatchcase(op, pattern) for pattern in rules.integer):
        return "no integer kernel"
    if not specs or not complete:
        return "an operand is float"
    widest, narrowest = max(s.bits for s in specs), min(s.bits for s in specs)
    if widest > 8:
        return f"{widest} bits"
    if rules.symmetric and not all(s.symmetric for s in specs):
        return "zero points must be 0"
    return f"{narrowest}-bit values are stored, then computed in float" if narrowest < 8 else ""
