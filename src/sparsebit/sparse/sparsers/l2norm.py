"""L2 norm: remove the least energy; a single large weight counts for more than in l1norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsebit.sparse.sparsers import base, register_sparser


@register_sparser
class L2NormSparser(base.Sparser):
    STRATEGY = "l2norm"

    def weights(self, layer: Any, name: str = "weight") -> Tensor:
        return base.magnitude(layer, name).square()

    def channels(self, layer: Any, name: str, axis: int, makes: bool) -> Tensor | None:
        energy = super().channels(layer, name, axis, makes)
        return None if energy is None else energy.sqrt()


Sparser = L2NormSparser
