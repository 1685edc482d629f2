"""Pruning. Configs are read and checked today; the pruning itself comes with a later release."""

from __future__ import annotations

from typing import Any

from sparsebit.errors import NotReadyError
from sparsebit.sparse.sparse_config import parse_sconfig

__all__ = ["SparseModel", "parse_sconfig"]


class SparseModel:
    def __init__(self, model: Any, config: Any) -> None:
        raise NotReadyError(
            "SparseModel: pruning is not part of this release yet; quantize with sparsebit.quantize"
        )
