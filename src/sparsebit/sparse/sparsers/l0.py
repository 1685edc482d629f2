"""L0: gates that learn, while the model trains, which channels (or weights) are needed.

Louizos et al., Learning Sparse Neural Networks through L0 Regularization, 2018: hard-concrete gates,
z = clip(1.2 sigmoid((logit(u) + log_alpha) / (2/3)) - 0.1, 0, 1), and the penalty is the expected number of open ones.
Train with `loss + smodel.penalty()`. A layer in front of a batch norm is gated behind it: before, the norm would undo
the gate.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from sparsebit.config import Config
from sparsebit.sparse.sparsers import base, register_sparser

LOW = -0.1
HIGH = 1.1
BETA = 2 / 3


@register_sparser
class L0Sparser(base.Sparser):
    STRATEGY = "l0"
    JUDGES = "Linear layers and convolutions"
    COMPARABLE = True

    class Params(Config):
        strength: float = Field(1e-3, ge=0, description="of the penalty on every open gate")
        open: float = Field(0.9, gt=0, lt=1, description="how open the gates are at the start")

    def __init__(self, config: Any, opr: Any = None):
        super().__init__(config, opr)
        self.log_alpha: nn.Parameter | None = None
        self._drawn: Tensor | None = None  # the factor of the weight, for the bias
        if opr is None or not self._gated(opr):
            return
        shape = base.by_output(opr, "weight", opr.weight).shape
        if self.kind == "structured":
            shape = torch.Size((shape[0], *[1] * (len(shape) - 1)))
        start = math.log(self.params.open / (1 - self.params.open))
        self.log_alpha = nn.Parameter(torch.full(shape, start, device=opr.weight.device))

    def _gated(self, layer: Any) -> bool:
        if getattr(layer, "weight", None) is None:
            return False
        if self.kind == "unstructured":
            return base.is_weighted(layer)
        return base.ends_channels(layer, makes=base.is_weighted(layer))

    def gate(self, layer: Any, name: str) -> Tensor | None:
        if self.log_alpha is None or (name == "bias" and self.kind == "unstructured"):
            return None
        if name == "bias":
            if self._drawn is None:
                return None
            return self._drawn.flatten()
        if self.training:
            u = torch.rand_like(self.log_alpha).clamp(1e-6, 1 - 1e-6)
            s = torch.sigmoid((torch.logit(u) + self.log_alpha) / BETA)
        else:
            s = torch.sigmoid(self.log_alpha)
        self._drawn = (s * (HIGH - LOW) + LOW).clamp(0, 1)
        return self._as_weight(layer, self._drawn)

    def _as_weight(self, layer: Any, gates: Tensor) -> Tensor:
        """Gates are stored by output, but the first axis of a transposed convolution has inputs."""
        rows = base.by_output(layer, "weight", layer.weight)
        return base.by_output(layer, "weight", gates.expand(rows.shape))

    def penalty(self, layer: Any) -> Tensor | None:
        if self.log_alpha is None:
            return None
        total: Tensor = (
            self.params.strength * torch.sigmoid(self.log_alpha - BETA * math.log(-LOW / HIGH)).sum()
        )
        return total

    def skips(self, layer: Any) -> bool:
        return self.log_alpha is None  # recurrent layers have no gates

    def weights(self, layer: Any, name: str = "weight") -> Tensor:
        assert self.log_alpha is not None
        return self._as_weight(layer, self.log_alpha.detach().sigmoid())

    def channels(self, layer: Any, name: str, axis: int, makes: bool) -> Tensor | None:
        if name != "weight" or self.log_alpha is None or not base.ends_channels(layer, makes):
            return None
        return base.on_axis(layer, name, self.log_alpha.detach().sigmoid().flatten())


Sparser = L0Sparser
