"""How far the outputs of a model are from those of another one: noise by signal, over some calls."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.graph.run.calls import Call


def decibels(noise: float) -> float:
    return -10 * math.log10(noise)


def outputs(model: nn.Module, call: Call) -> list[Tensor]:
    """The floating-point outputs of one call."""
    leaves = pytree.tree_leaves(call.run(model))
    return [x.detach().double() for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def noise(wanted: Sequence[list[Tensor]], found: Sequence[list[Tensor]]) -> float:
    """Geometric mean of noise by signal, over the outputs and their channels; 0 if nothing can be compared.

    Values that are not finite count for nothing. Channels count by themselves: a detector may give boxes of hundreds
    of pixels and scores below 1 in one tensor.
    """
    shares = []
    for want, got in zip(zip(*wanted), zip(*found)):
        if any(a.shape != b.shape for a, b in zip(want, got)):
            return 0.0
        are_channels = want[0].dim() > 2 and len({x.shape[1] for x in want}) == 1  # not tokens of texts
        a, b = (torch.cat([_rows(x, are_channels) for x in values], 1) for values in (want, got))
        usable = a.isfinite() & b.isfinite()
        count = usable.sum(1, keepdim=True).clamp(min=1)
        a = a.where(usable, 0.0)
        b = b.where(usable, 0.0)
        centred = (a - a.sum(1, keepdim=True) / count).where(usable, 0.0)
        signal = centred.square().sum(1)
        squares = (a - b).square().sum(1)
        known = (signal > 0) & (squares > 0)
        if bool(known.any()):
            shares.append(float((squares[known] / signal[known]).log().mean()))
    return math.exp(sum(shares) / len(shares)) if shares else 0.0


def _rows(x: Tensor, are_channels: bool) -> Tensor:
    """(channels, values), or a single row of all values."""
    if are_channels:
        return x.transpose(0, 1).reshape(x.shape[1], -1)
    return x.reshape(1, -1)
