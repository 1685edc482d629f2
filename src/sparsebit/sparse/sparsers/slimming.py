"""Slimming: remove channels with a small scale in their batch norm (Liu et al., Network Slimming, 2017).

Train with `loss + smodel.penalty()` first: strength * sum |gamma| drives the scales of useless channels to
zero.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from sparsebit.config import Config
from sparsebit.sparse.sparsers import base, register_sparser


@register_sparser
class SlimmingSparser(base.Sparser):
    STRATEGY = "slimming"
    JUDGES = "layers with a batch norm behind them"
    KINDS = ("structured",)
    COMPARABLE = True

    class Params(Config):
        strength: float = Field(1e-4, ge=0, description="of the penalty on the scales of batch norms")

    def channels(self, layer: Any, name: str, axis: int, makes: bool) -> Tensor | None:
        if name != "weight" or not isinstance(layer, _NormBase):
            return None
        return base.magnitude(layer, name)

    def penalty(self, layer: Any) -> Tensor | None:
        if not isinstance(layer, _NormBase) or layer.weight is None:
            return None
        total: Tensor = self.params.strength * layer.weight.abs().sum()
        return total


Sparser = SlimmingSparser
