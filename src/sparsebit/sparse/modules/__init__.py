"""Layers with masks. The class of a layer computes its output; here its parameters are masked before the
call."""

from __future__ import annotations

from sparsebit.sparse.modules.base import SparseOpr
from sparsebit.sparse.modules.layers import SConv2d, SLinear
from sparsebit.sparse.modules.norms import SBatchNorm2d
from sparsebit.sparse.modules.registry import SMODULE_MAP, register_smodule, sparse_module

__all__ = [
    "SMODULE_MAP",
    "SBatchNorm2d",
    "SConv2d",
    "SLinear",
    "SparseOpr",
    "register_smodule",
    "sparse_module",
]

SMODULE_MAP.discover(__name__)
