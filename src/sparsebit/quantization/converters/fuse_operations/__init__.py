"""Passes over QModules, after the quantizers are attached."""

from sparsebit.quantization.converters.fuse_operations.disable_unnecessary_quant import (
    disable_unnecessary_quant,
)
from sparsebit.quantization.converters.fuse_operations.equalize import equalize
from sparsebit.quantization.converters.fuse_operations.fuse_bn import fuse_bn
from sparsebit.quantization.converters.fuse_operations.reuse_memory import reuse_memory

FUSE_PASSES = [fuse_bn, disable_unnecessary_quant, equalize]
FINAL_PASSES = [reuse_memory]  # after the passes of users: they look at who reads what
