"""FPGM: remove filters near the geometric median of their layer, because the other filters can replace them.

He et al., Filter Pruning via Geometric Median, 2019: the score of filter i is the sum over j of |F_i - F_j|.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.sparse.sparsers import base, register_sparser


@register_sparser
class FPGMSparser(base.Sparser):
    STRATEGY = "fpgm"
    KINDS = ("structured",)

    def channels(self, layer: Any, name: str, axis: int, makes: bool) -> Tensor | None:
        weight = layer.get_parameter(name).detach().float()
        if weight.dim() < 2:
            return None
        filters = weight.movedim(axis, 0).flatten(1)
        return torch.cdist(filters, filters).sum(1)


Sparser = FPGMSparser
