"""Taylor: the change of the loss, to first order, if a channel (or weight) were zero.

Molchanov et al., Importance Estimation for Neural Network Pruning, 2019: the mean over batches of (sum g
w)^2. If a batch norm follows the layer, its weights are used, so that the score is that of the whole channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.sparse.sparsers import base, register_sparser


@register_sparser
class TaylorSparser(base.Sparser):
    STRATEGY = "taylor"
    JUDGES = "layers that the loss depends on"
    NEEDS = "gradients"
    COMPARABLE = True

    def __init__(self, config: Any, opr: Any = None):
        super().__init__(config, opr)
        self.change: dict[str, Tensor] = {}  # by parameter
        self.batches = 0

    def see_gradients(self, layer: Any) -> None:
        self.batches += 1
        for name, p in layer.layer_parameters().items():
            if p.grad is None or name.endswith("bias"):
                continue
            slope = (p.grad * p).detach().float()
            if self.kind == "structured":
                slope = base.per_output(layer, name, slope)
                bias = getattr(layer, "bias", None)
                if isinstance(bias, Tensor) and bias.grad is not None and len(bias) == len(slope):
                    slope = slope + (bias.grad * bias).detach().float()
            self.change[name] = self.change.get(name, torch.zeros_like(slope)) + slope.square()

    def skips(self, layer: Any) -> bool:
        return not self.change  # the loss does not depend on it

    def weights(self, layer: Any, name: str = "weight") -> Tensor:
        return self.change[name] / self.batches

    def channels(self, layer: Any, name: str, axis: int, makes: bool) -> Tensor | None:
        if name not in self.change or not base.ends_channels(layer, makes):
            return None
        return base.on_axis(layer, name, self.change[name] / self.batches)


Sparser = TaylorSparser
