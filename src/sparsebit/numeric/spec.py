"""QuantSpec and QParams: the only currency between observers, quantizers, exporters and packers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsebit.errors import ConfigError

MAX_BITS = 16


@dataclass(frozen=True)
class QuantSpec:
    """The kind of grid that a tensor is rounded to. Symmetric: signed codes, zero point 0. Affine: unsigned codes.

    `axis` is the channel axis, or None for one scale per tensor. `group` splits each channel of axis 0 into runs of
    that many values with a scale each (weights of Linear layers). `narrow` drops the lowest symmetric code, so that
    the codes are balanced around zero.
    """

    bits: int = 8
    symmetric: bool = True
    axis: int | None = None
    narrow: bool = False
    group: int | None = None

    def __post_init__(self) -> None:
        if self.group is not None and self.axis != 0:
            raise ConfigError("GROUP: groups are parts of the channels of axis 0; use a per-channel QSCHEME")
        if not 1 <= self.bits <= MAX_BITS:
            raise ConfigError(f"BIT: must be between 1 and {MAX_BITS}, got {self.bits}")

    @property
    def qmin(self) -> int:
        if self.symmetric:
            return -(2 ** (self.bits - 1)) + int(self.narrow)
        return 0

    @property
    def qmax(self) -> int:
        if self.symmetric:
            return 2 ** (self.bits - 1) - 1
        return 2**self.bits - 1

    @property
    def levels(self) -> int:
        """Steps between the lowest and the highest code."""
        return self.qmax - self.qmin

    @property
    def per_channel(self) -> bool:
        return self.axis is not None

    @property
    def ungrouped(self) -> QuantSpec:
        """The grid of `in_groups(x)`, where a group is a channel."""
        return replace(self, group=None)

    def with_bits(self, bits: int) -> QuantSpec:
        return replace(self, bits=bits)


@dataclass(frozen=True)
class QParams:
    """Scale and zero point, one per tensor (shape `(1,)`), per channel (`(channels,)`) or per group (all in a row)."""

    scale: Tensor
    zero_point: Tensor


def channel_axis(ndim: int, axis: int | None) -> int | None:
    """The channel axis of a tensor of `ndim` dimensions; the last one where it has fewer (NLC fed with NC)."""
    if axis is None or ndim == 0:
        return None
    if axis >= 0:
        return min(axis, ndim - 1)
    return max(axis + ndim, 0)


def in_groups(x: Tensor, group: int | None) -> Tensor:
    """`x` as rows of one group each, so that a group is a channel of axis 0; without groups `x` itself."""
    return x if group is None else x.reshape(-1, group)


def as_channels(x: Tensor, axis: int | None) -> Tensor:
    """View `x` as (channels, samples), the one shape that statistics are written for; per tensor is one channel.

    Per tensor the order of samples is that of memory, so channels_last tensors are not copied.
    """
    axis = channel_axis(x.dim(), axis)
    if axis is not None:
        return x.movedim(axis, 0).reshape(x.shape[axis], -1)
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        x = x.permute(0, 2, 3, 1)
    return x.reshape(1, -1)


def broadcast(p: Tensor, ndim: int, axis: int | None) -> Tensor:
    """Reshape per-channel values so that they line up with the channel axis of an `ndim` tensor."""
    axis = channel_axis(ndim, axis)
    if axis is None:
        return p.reshape(()) if ndim == 0 else p
    return p.reshape([-1 if i == axis else 1 for i in range(ndim)])
