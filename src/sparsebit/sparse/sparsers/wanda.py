"""Wanda: |w| times the norm of its input; weights compete inside a row.

Sun et al., A Simple and Effective Pruning Approach for Large Language Models, 2023.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.sparse.sparsers import base, register_sparser


@register_sparser
class WandaSparser(base.Sparser):
    STRATEGY = "wanda"
    NEEDS = "batches"
    PER_ROW = True

    def __init__(self, config: Any, opr: Any = None):
        super().__init__(config, opr)
        self.energy: Tensor | float = 0.0  # of every input channel
        self.values = 0

    def see(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x = inputs[0] if inputs else None
        if not isinstance(x, Tensor) or not x.is_floating_point() or not base.is_weighted(layer):
            return
        rows = x.detach().float().movedim(base.input_axis(layer, x), -1).flatten(0, -2)
        self.energy = self.energy + rows.square().sum(0)
        self.values += len(rows)

    def weights(self, layer: Any, name: str = "weight") -> Tensor:
        if not self.values:  # a recurrent layer, or one that no batch reached
            return base.magnitude(layer, name)
        size = (torch.as_tensor(self.energy) / self.values).sqrt()
        return base.magnitude(layer, name) * base.along_inputs(layer, size)


Sparser = WandaSparser
