"""L1 norm: remove the smallest absolute values (Li et al., Pruning Filters for Efficient ConvNets, 2017)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsebit.sparse.sparsers import base, register_sparser


@register_sparser
class L1NormSparser(base.Sparser):
    STRATEGY = "l1norm"

    def weights(self, layer: Any, name: str = "weight") -> Tensor:
        return base.magnitude(layer, name)


Sparser = L1NormSparser
