"""Int8Linear: weights and activations in 8 bits; each token is put on its own grid when it comes."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.llm.layers.linear import QuantLinear
from sparsebit.numeric.solvers.smoothquant import round_tokens


class Int8Linear(QuantLinear):
    """Computes what an int8 product gives, as a float product of rounded values; gradients pass straight through."""

    def forward(self, x: Tensor) -> Tensor:
        rounded = round_tokens(x.detach())
        if x.requires_grad and torch.is_grad_enabled():
            rounded = x + (rounded - x.detach())
        return super().forward(rounded)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activations=8 per token"
