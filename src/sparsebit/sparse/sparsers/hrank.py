"""HRank: channels whose feature maps have a low rank carry little (Lin et al., HRank, 2020).

The rank of a map hardly depends on the image, so a few batches are enough. Only layers that make maps have one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.sparse.sparsers import base, register_sparser


@register_sparser
class HRankSparser(base.Sparser):
    STRATEGY = "hrank"
    JUDGES = "layers that make maps: (images, channels, height, width)"
    KINDS = ("structured",)
    NEEDS = "batches"

    def __init__(self, config: Any, opr: Any = None):
        super().__init__(config, opr)
        self.ranks: Tensor | float = 0.0
        self.images = 0

    def see(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor) or output.dim() != 4:
            return
        maps = output.detach().float().movedim(base.output_axis(layer, output), 1)
        if min(maps.shape[2:]) > 1:
            self.ranks = self.ranks + torch.linalg.matrix_rank(maps).float().sum(0)
            self.images += len(output)

    def channels(self, layer: Any, name: str, axis: int, makes: bool) -> Tensor | None:
        if name != "weight" or not self.images or not base.ends_channels(layer, makes):
            return None
        return base.on_axis(layer, name, torch.as_tensor(self.ranks) / self.images)


Sparser = HRankSparser
