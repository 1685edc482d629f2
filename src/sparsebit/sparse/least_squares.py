"""Linear layers by least squares: sums over the data first, then the weights. One pass, no step size, no labels.

Where a batch norm follows, the length of a filter changes nothing but how fast training turns it, so filters get a
length that is asked for (what that is worth: docs/decisions.md), and the norm what makes up for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DAMPING = 1e-4  # of the mean variance of what is read
CONSTANT = 1e-8  # of the mean square of what is read: less variance than this is rounding
PIECE = 1 << 24  # numbers at a time
LEAST = 1024  # positions of a batch that are looked at
ENOUGH = 8  # positions for every weight of a filter; with less, a fit is to the noise


class Layer(NamedTuple):
    """A linear layer or a convolution without groups, perhaps with a batch norm behind it, and the inputs it reads."""

    linear: Any
    norm: Any = None
    reads: Any = slice(None)


def moment(layer: Layer, x: Tensor, y: Tensor, per_weight: float, draw: torch.Generator) -> Tensor:
    """Sums over x' [x' y]: x' is what a filter reads at a position, and a one; y what is wanted there.

    per_weight   positions, drawn at random, for every weight of a filter; LEAST or more
    """
    linear = layer.linear
    if isinstance(linear, nn.Linear):
        x, y = (v.reshape(-1, v.shape[-1]) for v in (x, y))
    else:
        mode = "constant" if linear.padding_mode == "zeros" else linear.padding_mode
        x = F.pad(x, linear._reversed_padding_repeated_twice, mode)
    places, x = (len(y), *y.shape[2:]), x[:, layer.reads]
    weights = x.shape[1] * linear.weight[0, 0].numel()
    some = torch.randperm(math.prod(places), generator=draw)[: max(LEAST, math.ceil(per_weight * weights))]
    found = torch.zeros((), dtype=torch.float64, device=x.device)
    for piece in some.to(x.device).split(max(1, PIECE // weights)):
        at = torch.unravel_index(piece, places)
        a, b = _read(linear, x, at).double(), _at(y, at).double()
        a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        found = found + a.T @ torch.cat([a, b], 1)
    return found


def total(layer: Layer, y: Tensor) -> Tensor:
    """The same without x: how many positions, and the sum over y."""
    rows = y if isinstance(layer.linear, nn.Linear) else y.movedim(1, -1)
    rows = rows.reshape(-1, rows.shape[-1]).double()
    return torch.cat([rows.new_tensor([len(rows)]), rows.sum(0)])[None]


def _read(linear: Any, x: Tensor, at: Sequence[Tensor]) -> Tensor:
    """What the filters read at these positions of their output: as many rows."""
    if len(at) == 1:
        return x[at[0]]
    starts = [place * stride for place, stride in zip(at[1:], linear.stride)]
    taps = [
        _at(x, (at[0], *(s + k * d for s, k, d in zip(starts, tap, linear.dilation))))
        for tap in itertools.product(*map(range, linear.kernel_size))
    ]
    return torch.stack(taps, 2).flatten(1)


def _at(value: Tensor, at: Sequence[Tensor]) -> Tensor:
    """All channels at these positions: as many rows."""
    index: Any = (at[0], slice(None), *at[1:])
    return value[index]


def solve(sums: Tensor, size: float, layer: Layer) -> None:
    """Set the layer to what comes closest; with a norm, filters get the length `size`."""
    matrix, bias = _solution(sums, True)
    _set(layer, sums, matrix, bias, size)


def renew(layer: Layer, sums: Tensor) -> bool:
    """Change the layer by what y lacks; without x, or with little data, only its mean. Returns whether weights too."""
    linear, norm, n = layer.linear, layer.norm, len(sums) - 1
    if not sums[n, n] or not sums.isfinite().all():
        return False
    if n == 0 or float(sums[n, n]) < ENOUGH * n:
        bias = linear.bias if norm is None else norm.bias
        if bias is not None:
            bias += sums[n, n + 1 :] / sums[n, n]
        return False
    more, shift = _solution(sums, norm is not None or linear.bias is not None)
    weight = linear.weight[:, layer.reads].double().flatten(1)
    if norm is None:
        _set(layer, sums, weight + more, shift if linear.bias is None else linear.bias + shift, 0.0)
        return True
    gain = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    size = float(weight.norm(dim=1).mean()) or 1.0
    offset = (0 if linear.bias is None else linear.bias) - norm.running_mean
    _set(layer, sums, gain[:, None] * weight + more, norm.bias + gain * offset + shift, size)
    return True


def _solution(sums: Tensor, free: bool) -> tuple[Tensor, Tensor]:
    """The matrix and what is added, if that is free."""
    n = len(sums) - 1
    mean = sums[n] / sums[n, n] * free  # of x, of the one, of y
    moved = sums[:n] / sums[n, n] - mean[:n, None] * mean
    spread, joint = moved[:, :n], moved[:, n + 1 :]
    scale = torch.maximum(spread.diagonal().mean(), CONSTANT * sums.diagonal()[:n].mean() / sums[n, n])
    damped = spread + DAMPING * scale.clamp_min(1e-30) * torch.eye(n).to(spread)
    matrix = torch.linalg.solve(damped, joint).T
    return matrix, mean[n + 1 :] - matrix @ mean[:n]


def _set(layer: Layer, sums: Tensor, matrix: Tensor, bias: Tensor, size: float) -> None:
    linear, norm, n = layer.linear, layer.norm, len(sums) - 1
    shape = linear.weight[:, layer.reads].shape
    if norm is None:
        linear.weight[:, layer.reads] = matrix.reshape(shape).to(linear.weight)
        if linear.bias is not None:
            linear.bias.copy_(bias)
        return
    mean = sums[n, :n] / sums[n, n]
    spread = sums[:n, :n] / sums[n, n] - mean[:, None] * mean
    center, var = matrix @ mean, (matrix @ spread * matrix).sum(1).clamp_min(0)
    scale = size / matrix.norm(dim=1).clamp_min(1e-12)
    linear.weight[:, layer.reads] = (matrix * scale[:, None]).reshape(shape).to(linear.weight)
    norm.running_mean.copy_(center * scale + (0 if linear.bias is None else linear.bias))
    norm.running_var.copy_(var * scale**2)
    norm.weight.copy_((var + norm.eps / scale**2).sqrt())
    norm.bias.copy_(bias + center)
