"""Graph rewriting for users' own flows: `simplify(model)`, `fuse_operations(model, config)`, pattern classes."""

from __future__ import annotations

# the function takes the name of its package here, as in the original
from sparsebit.quantization.converters.fuse_operations import fuse_operations
from sparsebit.quantization.converters.simplifiers import simplify

__all__ = ["fuse_operations", "simplify"]
