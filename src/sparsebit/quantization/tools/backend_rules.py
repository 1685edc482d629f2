"""What each backend computes in integers. Data and one pure function, so that the exporter can use the same rules.

onnxruntime: measured with onnxruntime 1.31.1 (CPU), one Q/DQ graph per op, reading the optimised graph. TensorRT and
OpenVINO: from their documentation (explicit quantization; low precision transformations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sparsebit.numeric.spec import QuantSpec


@dataclass(frozen=True)
class BackendRules:
    """Ops are names as the pre-flight table shows them (`Conv2d`, `AdaptiveAvgPool2d`), as fnmatch patterns."""

    integer: tuple[str, ...]  # have an integer kernel
    free_output: tuple[str, ...] = ("*",)  # of those: need no quantizer behind them
    symmetric: bool = False  # zero points must be 0
    slow_symmetric: str = ""  # advice, where activations without a zero point are slow


OUTPUT = "its output is not quantized"
WEIGHTED = ("*Conv[123]d*", "Conv1D", "ConvFunction", "*Linear*")
RULES: dict[str, BackendRules] = {
    "onnxruntime": BackendRules(
        integer=(
            *WEIGHTED,
            *(
                "MatMul",
                "AddMM",
                "Add",
                "Mul",
                "Concat",
                "*AvgPool*",
                "MaxPool*",
                "LeakyReLU",
                "Sigmoid",
                "Softmax",
            ),
        ),
        free_output=("*Linear*", "Conv1D", "MatMul", "AddMM", "MaxPool*"),
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
    backend: str, op: str, specs: Sequence[QuantSpec], complete: bool, output: bool
) -> tuple[bool, str]:
    """Does `backend` compute `op` in integers? If not, why.

    specs     the grids of everything it reads that is quantized: weight, inputs.
    complete  all of its operands are quantized.
    output    what reads its output quantizes it.
    """
    rules = RULES.get(backend)
    if rules is None:
        return False, "simulated in float"
    if not _any(op, rules.integer):
        return False, "no integer kernel"
    if not specs or not complete:
        return False, "an operand is float"
    wide = next((s for s in specs if s.bits > 8), None)
    narrow = min(s.bits for s in specs) < 8
    if wide is not None:
        return False, f"{wide.bits} bits"
    if rules.symmetric and not all(s.symmetric for s in specs):
        return False, "zero points must be 0"
    if narrow:
        return False, f"{min(s.bits for s in specs)}-bit values are stored, then computed in float"
    if not output and not _any(op, rules.free_output):
        return False, OUTPUT
    return True, "integers"


def _any(op: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(op, p) for p in patterns)
