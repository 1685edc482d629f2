"""Pruning. Labels tell which channels depend on each other, sparsers score them, and the cut removes the
least important."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparsebit.sparse.sparse_config import parse_sconfig

if TYPE_CHECKING:
    from sparsebit.sparse.depth.merge_blocks import merge
    from sparsebit.sparse.depth.shorten_branches import find_branches, shorten
    from sparsebit.sparse.plan import Plan
    from sparsebit.sparse.prune import prune_blocks
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
    "prune_blocks",
    "shorten",
]

HOMES = {
    "Plan": "plan",
    "Schedule": "schedule",
    "SparseModel": "sparse_model",
    "find_branches": "depth.shorten_branches",
    "keep_zeros": "zeros",
    "merge": "depth.merge_blocks",
    "prune_blocks": "prune",
    "shorten": "depth.shorten_branches",
}


def __getattr__(name: str) -> Any:
    """A config is read without torch. The names that need torch are imported when they are first used."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
