"""Which ONNX integer type holds a grid, and from which opset on.

Weights take the smallest type, for the size of the file. Activations below 8 bits take 8 bits with saturation at
their own range: codes of 8 bits have integer kernels, and need no newer opset.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebit.errors import ExportError
from sparsebit.export.kernels.wrong_kernels import is_wrong
from sparsebit.export.onnx.marks import Mark, Marks

LOWEST_OPSET = 18  # of torch's exporter
HIGHEST_OPSET = 25
SINCE = {2: 25, 4: 21, 8: LOWEST_OPSET, 16: 21}  # bits of the type -> opset
BLOCKS_SINCE = 21  # DequantizeLinear with block_size


def container_bits(mark: Mark) -> int:
    """3 bits of a weight live in a 4-bit type, 5 to 7 in an 8-bit one."""
    least = mark.spec.bits if mark.is_weight else max(mark.spec.bits, 8)
    if least <= 2 and mark.weight is not None and mark.weight.dim() == 2 and mark.weight.shape[0] % 4:
        least = 4 if is_wrong("MatMulNBits") else 2
    return next(bits for bits in SINCE if bits >= least)


def container(mark: Mark) -> np.dtype[Any]:
    """The numpy type (ml_dtypes below 8 bits) of a grid's codes."""
    name = f"{'int' if mark.spec.symmetric else 'uint'}{container_bits(mark)}"
    if container_bits(mark) < 8:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def exporter_opset(asked: int) -> tuple[int, str]:
    """The opset that torch's exporter writes, and why: the lowest it knows, never lower than asked."""
    if not 1 <= asked <= HIGHEST_OPSET:
        raise ExportError(f"opset_version: {asked} is not between 1 and {HIGHEST_OPSET}")
    if asked >= LOWEST_OPSET:
        return asked, "as asked"
    return LOWEST_OPSET, f"{asked} was asked; {LOWEST_OPSET} is the lowest that torch's exporter writes"


def opset_for(marks: Marks) -> int:
    return max(map(since, marks.values()), default=LOWEST_OPSET)


def since(mark: Mark) -> int:
    """The first opset that can hold this grid."""
    return max(SINCE[container_bits(mark)], BLOCKS_SINCE if mark.spec.group is not None else LOWEST_OPSET)
