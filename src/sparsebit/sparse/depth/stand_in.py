"""The linear layer that comes closest to f, a branch of a residual addition x + f(x).

It is a 1x1 convolution or a Linear, fitted by least squares in one pass over the data with C x C sums. If f
has a batch norm, it gets one too. The norm of a filter in front of a batch norm only changes how fast
training turns the filter, so the layer gets the norm of the filters that it replaces (docs/experiments.md has
the measurements).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

KINDS: dict[int, Any] = {
    3: (nn.Conv1d, nn.BatchNorm1d),
    4: (nn.Conv2d, nn.BatchNorm2d),
    5: (nn.Conv3d, nn.BatchNorm3d),
}


def stand_in(channels: int, rank: int, normed: bool, like: Tensor) -> nn.Sequential:
    """A convolution over values with `rank` axes (0: a linear layer), and a norm. Before it is fitted it
    returns zeros."""
    linear: Any = nn.Linear(channels, channels)
    if rank in KINDS:
        linear = KINDS[rank][0](channels, channels, 1, bias=not normed)
    if normed:
        layers = [linear, KINDS[rank][1](channels)]
    else:
        layers = [linear]
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(*layers).to(like.device, like.dtype).eval()


def rows(value: Tensor, layer: nn.Module) -> Tensor:
    """The value as a matrix (positions, channels)."""
    if not (isinstance(layer, nn.Linear)):
        value = value.movedim(1, -1)
    return value.reshape(-1, value.shape[-1]).double()
