"""Norms. A norm over all channels takes its statistics from the kept channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.graph.run.calls import device_of
from sparsebit.sparse.modules.base import SparseOpr
from sparsebit.sparse.modules.registry import register_smodule


@register_smodule(sources=[nn.BatchNorm2d])
class SBatchNorm2d(SparseOpr, nn.BatchNorm2d):
    @property
    def mask(self) -> Tensor:
        """The original's name."""
        return self.mask_of("weight")


class _OverKept(SparseOpr):
    """`kept` holds the channels along `axis` that the statistics are over; the other channels of the output are
    zero."""

    kept: Tensor
    axis = -1

    def __init__(self, org_module: nn.Module, config: Any = None):
        super().__init__(org_module, config)
        device = device_of(org_module)
        self.register_buffer("kept", torch.ones(self.channels(), dtype=torch.bool, device=device))

    def channels(self) -> int:
        raise NotImplementedError

    def is_over_channels(self) -> bool:
        return True

    def of_kept(self, input: Tensor) -> Tensor:
        """The output of the layer for an input that has only the kept channels."""
        out: Tensor = super(SparseOpr, self).forward(input)
        return out

    def reset_masks(self) -> None:
        super().reset_masks()
        self.kept.fill_(True)

    def forward(self, input: Tensor) -> Tensor:
        if not self.is_over_channels() or bool(self.kept.all()):
            return super().forward(input)
        index = self.kept.nonzero().flatten()
        values = {name: self.masked(name).index_select(0, index) for name in self.layer_parameters()}
        with self.using(values):
            out = self.of_kept(input.index_select(self.axis, index))
        return torch.zeros_like(input).index_copy(self.axis, index, out)


class _OverLastAxis(_OverKept):
    normalized_shape: tuple[int, ...]

    def channels(self) -> int:
        return self.normalized_shape[-1]

    def of_kept(self, input: Tensor) -> Tensor:
        shape = self.normalized_shape
        self.normalized_shape = (input.shape[-1],)
        try:
            return super().of_kept(input)
        finally:
            self.normalized_shape = shape


@register_smodule(sources=[nn.LayerNorm])
class SLayerNorm(_OverLastAxis, nn.LayerNorm):
    pass


@register_smodule(sources=[nn.RMSNorm])
class SRMSNorm(_OverLastAxis, nn.RMSNorm):
    pass


@register_smodule(sources=[nn.GroupNorm])
class SGroupNorm(_OverKept, nn.GroupNorm):
    """A group norm. With one group it works like a layer norm. Otherwise whole groups are removed, and `kept` is not
    used."""

    axis = 1

    def channels(self) -> int:
        return self.num_channels

    def is_over_channels(self) -> bool:
        return self.num_groups == 1
