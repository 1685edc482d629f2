"""Second moments of the inputs of layers. They are collected while sparsers see batches, for
mend/one_shot.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.sparse.sparsers import base

DAMPING = 1e-3  # of the mean energy, added to the diagonal
FEW = 16  # samples: weights that are fitted to fewer may suit other data less


class Moments:
    """Second moments of the input channels of a layer."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.rows = 0

    @staticmethod
    def wanted(layer: Any) -> bool:
        return base.is_weighted(layer) and getattr(layer, "groups", 1) == 1

    def add(self, layer: Any, x: Any) -> None:
        if isinstance(x, Tensor) and x.is_floating_point():
            rows = x.detach().float().movedim(base.input_axis(layer, x), -1).flatten(0, -2)
            square = rows.T @ rows
            if self.total is None:
                self.total = square
            else:
                self.total = self.total + square
            self.rows += len(rows)

    def matrix(self) -> Tensor | None:
        if self.total is None:
            return None
        h = self.total.double()
        return h + DAMPING * h.diagonal().mean().clamp_min(1e-30) * torch.eye(
            len(h), dtype=h.dtype, device=h.device
        )
