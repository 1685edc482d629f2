"""The linear layer that comes closest to f, a branch of a residual addition x + f(x).

A 1x1 convolution or a linear layer, fitted by least squares: one pass over the data, C x C numbers. Where f has a batch
norm it gets one too. Behind that the length of a filter changes nothing but how fast training turns it, so it gets that
of the filters it stands in for (what that is worth: docs/decisions.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

DAMPING = 1e-4  # of the mean variance of the channels
KINDS: dict[int, Any] = {
    3: (nn.Conv1d, nn.BatchNorm1d),
    4: (nn.Conv2d, nn.BatchNorm2d),
    5: (nn.Conv3d, nn.BatchNorm3d),
}


def stand_in(channels: int, rank: int, normed: bool, like: Tensor) -> nn.Sequential:
    """A convolution over values with `rank` axes (0: a linear layer), and a norm. Until it is fitted it gives zeros."""
    linear: Any = nn.Linear(channels, channels)
    if rank in KINDS:
        linear = KINDS[rank][0](channels, channels, 1, bias=not normed)
    layers = [linear, KINDS[rank][1](channels)] if normed else [linear]
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(*layers).to(like.device, like.dtype).eval()


def rows(value: Tensor, layer: nn.Module) -> Tensor:
    """(positions, channels)."""
    value = value if isinstance(layer, nn.Linear) else value.movedim(1, -1)
    return value.reshape(-1, value.shape[-1]).double()


def solve(moment: Tensor, size: float, linear: Any, norm: Any = None) -> None:
    """Set the layers from sums over x' [x' y], where x' is x and a one; with a norm, filters get the length `size`."""
    n = len(moment) - 1
    mean = moment[n] / moment[n, n]  # of x, of the one, of y
    moved = moment[:n] / moment[n, n] - mean[:n, None] * mean
    spread, joint = moved[:, :n], moved[:, n + 1 :]
    damped = spread + DAMPING * spread.diagonal().mean() * torch.eye(n).to(spread)
    matrix = torch.linalg.solve(damped, joint).T
    bias = mean[n + 1 :] - matrix @ mean[:n]
    if norm is None:
        linear.weight.copy_(matrix.reshape(linear.weight.shape))
        linear.bias.copy_(bias)
        return
    center, var = matrix @ mean[:n], (matrix @ spread * matrix).sum(1).clamp_min(0)
    scale = size / matrix.norm(dim=1).clamp_min(1e-12)
    linear.weight.copy_((matrix * scale[:, None]).reshape(linear.weight.shape))
    norm.running_mean.copy_(center * scale)
    norm.running_var.copy_(var * scale**2)
    norm.weight.copy_((var + norm.eps / scale**2).sqrt())
    norm.bias.copy_(bias + center)
