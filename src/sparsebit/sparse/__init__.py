"""Pruning: labels on channels say what goes together, sparsers what matters least, and what goes is really removed."""

from __future__ import annotations

from sparsebit.sparse.plan import Plan
from sparsebit.sparse.schedule import Schedule
from sparsebit.sparse.sparse_config import parse_sconfig
from sparsebit.sparse.sparse_model import SparseModel
from sparsebit.sparse.zeros import keep_zeros

__all__ = ["Plan", "Schedule", "SparseModel", "keep_zeros", "parse_sconfig"]
