"""Pruning: labels on channels say what goes together, sparsers what matters least, and what goes is really removed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparsebit.sparse.sparse_config import parse_sconfig

if TYPE_CHECKING:
    from sparsebit.sparse.depth.merge_blocks import merge
    from sparsebit.sparse.depth.shorten_branches import find_branches, shorten
    from sparsebit.sparse.plan import Plan
    from sparsebit.sparse.schedule import Schedule
    from sparsebit.sparse.sparse_model import SparseModel
    from sparsebit.sparse.zeros import keep_zeros

__all__ = [
    "Plan",
    "Schedule",
    "SparseModel",
    "find_branches",
    "keep_zeros",
    "merge",
    "parse_sconfig",
    "shorten",
]

HOMES = {
    "Plan": "plan",
    "Schedule": "schedule",
    "SparseModel": "sparse_model",
    "find_branches": "depth.shorten_branches",
    "keep_zeros": "zeros",
    "merge": "depth.merge_blocks",
    "shorten": "depth.shorten_branches",
}


def __getattr__(name: str) -> Any:
    """Reading a config needs no torch: what does is loaded when it is first used."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
