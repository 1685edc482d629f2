"""The fuse passes in the order in which they run. `lists.py` has their names, for scripts of the original."""

from __future__ import annotations

from sparsebit.quantization.converters.fuse_operations.disable_unnecessary_quant import (
    disable_unnecessary_quant,
)
from sparsebit.quantization.converters.fuse_operations.equalize import equalize, equalize_sums
from sparsebit.quantization.converters.fuse_operations.fuse_bn import fuse_bn
from sparsebit.quantization.converters.fuse_operations.integer_outputs import integer_outputs
from sparsebit.quantization.converters.fuse_operations.known_ranges import known_ranges
from sparsebit.quantization.converters.fuse_operations.one_grid import one_grid
from sparsebit.quantization.converters.fuse_operations.softmax_in_float import softmax_in_float
from sparsebit.quantization.converters.fuse_operations.wholly_float import wholly_float

FUSE_PASSES = [
    equalize_sums,  # sums are read off batch norms, so this is before fuse_bn
    fuse_bn,
    disable_unnecessary_quant,
    softmax_in_float,
    integer_outputs,
    equalize,
    one_grid,
    wholly_float,
    known_ranges,
]
