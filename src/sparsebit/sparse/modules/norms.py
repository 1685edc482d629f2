"""Norms. A layer norm that lost channels takes its statistics from those that are left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.sparse.modules import register_smodule
from sparsebit.sparse.modules.base import SparseOpr


@register_smodule(sources=[nn.BatchNorm2d])
class SBatchNorm2d(SparseOpr, nn.BatchNorm2d):
    @property
    def mask(self) -> Tensor:
        """The original's name."""
        return self.mask_of("weight")


class _OverKept(SparseOpr):
    """`kept` says which channels the statistics are over; the others come out as zero."""

    kept: Tensor
    normalized_shape: tuple[int, ...]

    def __init__(self, org_module: nn.Module, config: Any = None):
        super().__init__(org_module, config)
        device = next((p.device for p in org_module.parameters()), None)
        kept = torch.ones(self.normalized_shape[-1:], dtype=torch.bool, device=device)
        self.register_buffer("kept", kept)

    def reset_masks(self) -> None:
        super().reset_masks()
        self.kept.fill_(True)

    def forward(self, input: Tensor) -> Tensor:
        if bool(self.kept.all()):
            return super().forward(input)
        index, shape = self.kept.nonzero().flatten(), self.normalized_shape
        values = {name: self.masked(name).index_select(0, index) for name in self.layer_parameters()}
        self.normalized_shape = (len(index),)
        try:
            with self.using(values):
                out = super(SparseOpr, self).forward(input.index_select(-1, index))
        finally:
            self.normalized_shape = shape
        return torch.zeros_like(input).index_copy(-1, index, out)


@register_smodule(sources=[nn.LayerNorm])
class SLayerNorm(_OverKept, nn.LayerNorm):
    pass


@register_smodule(sources=[nn.RMSNorm])
class SRMSNorm(_OverKept, nn.RMSNorm):
    pass
