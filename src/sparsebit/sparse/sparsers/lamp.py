"""LAMP: the energy of a weight over that of all weights of the layer that are at least as large; for SCOPE:
global.

Lee et al., Layer-Adaptive Sparsity for the Magnitude-based Pruning, 2021.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.sparse.sparsers import base, register_sparser


@register_sparser
class LAMPSparser(base.Sparser):
    STRATEGY = "lamp"
    COMPARABLE = True

    def weights(self, layer: Any, name: str = "weight") -> Tensor:
        return lamp(base.magnitude(layer, name).square())

    def channels(self, layer: Any, name: str, axis: int, makes: bool) -> Tensor | None:
        if not makes:
            return None
        return lamp(base.per_channel(base.magnitude(layer, name).square(), axis))


def lamp(energy: Tensor) -> Tensor:
    flat, order = energy.flatten().double().sort(stable=True)
    left = flat.flip(0).cumsum(0).flip(0)  # itself and all that come after it
    return torch.empty_like(flat).scatter_(0, order, flat / left.clamp_min(1e-300)).view_as(energy)


Sparser = LAMPSparser
