"""SparseGPT: it uses the inputs like wanda, and it corrects the kept weights (numeric/solvers/sparsegpt.py).

It is for Linear layers and convolutions without groups; other layers are kept whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sparsebit.config import Config
from sparsebit.numeric.solvers.sparsegpt import sparsegpt
from sparsebit.sparse.sparsers import base, register_sparser


@register_sparser
class SparseGPTSparser(base.Sparser):
    STRATEGY = "sparsegpt"
    JUDGES = "Linear layers, and convolutions without groups"
    KINDS = ("unstructured",)
    NEEDS = "batches"

    class Params(Config):
        damping: float = Field(0.01, gt=0, description="added to the diagonal of the Hessian, of its mean")

    def __init__(self, config: Any, opr: Any = None):
        super().__init__(config, opr)
        self.hessian: Tensor | float = 0.0
        self.rows = 0

    def see(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x = None
        if inputs and isinstance(inputs[0], Tensor):
            x = columns(layer, inputs[0])
        if x is not None:
            self.hessian = self.hessian + (x.T @ x).double()
            self.rows = self.rows + len(x)

    def skips(self, layer: Any) -> bool:
        return not self.rows

    def solve(
        self, layer: Any, ratio: float, pattern: tuple[int, int] | None
    ) -> tuple[Tensor, Tensor] | None:
        flat = layer.weight.detach()
        order = (0, *range(2, flat.dim()), 1)  # input channels last: n:m counts along them
        moved = flat.permute(order)
        matrix, mask = sparsegpt(
            moved.flatten(1),
            torch.as_tensor(self.hessian),
            ratio,
            pattern,
            self.params.damping,
            flat.shape[1] if flat.dim() > 2 else None,
        )
        back = [order.index(d) for d in range(flat.dim())]
        return matrix.view(moved.shape).permute(back), mask.view(moved.shape).permute(back)


def columns(layer: Any, x: Tensor) -> Tensor | None:
    """The inputs of the weight matrix, one row each; its columns are (kernel position, input channel)."""
    x = x.detach().float()
    if isinstance(layer, nn.Linear):
        return x.flatten(0, -2)
    if not isinstance(layer, (nn.Conv1d, nn.Conv2d)) or layer.groups > 1 or layer.padding_mode != "zeros":
        return None
    if isinstance(layer.padding, str):
        return None
    as2d = x if isinstance(layer, nn.Conv2d) else x.unsqueeze(2)
    pair = lambda v, first: v if isinstance(layer, nn.Conv2d) else (first, *v)
    size = pair(layer.kernel_size, 1)
    step = pair(layer.stride, 1)
    patches = F.unfold(as2d, size, pair(layer.dilation, 1), pair(layer.padding, 0), step)
    n, _, places = patches.shape
    by_channel = patches.view(n, layer.in_channels, -1, places)  # (images, channel, kernel position, places)
    return by_channel.permute(0, 3, 2, 1).reshape(n * places, -1)


Sparser = SparseGPTSparser
