"""Random: the baseline that every other sparser has to beat. It follows torch.manual_seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.sparse.sparsers import base, register_sparser


@register_sparser
class RandomSparser(base.Sparser):
    STRATEGY = "random"
    COMPARABLE = True

    def weights(self, layer: Any, name: str = "weight") -> Tensor:
        return torch.rand_like(base.magnitude(layer, name))

    def channels(self, layer: Any, name: str, axis: int, makes: bool) -> Tensor | None:
        p = layer.get_parameter(name)
        if makes:
            return torch.rand(p.shape[axis], device=p.device)
        return None


Sparser = RandomSparser
