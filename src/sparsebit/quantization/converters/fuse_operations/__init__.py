"""Passes over QModules, after the quantizers are attached."""

from sparsebit.quantization.converters.fuse_operations.disable_unnecessary_quant import (
    disable_unnecessary_quant,
)
from sparsebit.quantization.converters.fuse_operations.equalize import equalize, equalize_sums
from sparsebit.quantization.converters.fuse_operations.fuse_bn import fuse_bn
from sparsebit.quantization.converters.fuse_operations.reuse_memory import reuse_memory
from sparsebit.quantization.converters.fuse_operations.softmax_grids import softmax_grids

FUSE_PASSES = [
    equalize_sums,
    fuse_bn,
    disable_unnecessary_quant,
    softmax_grids,
    equalize,
]  # sums are read off batch norms
FINAL_PASSES = [reuse_memory]  # after the passes of users: they look at who reads what
