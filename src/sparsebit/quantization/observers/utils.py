"""Legacy: the loss of the original's MSE observer."""

from __future__ import annotations

from torch import Tensor


def mse_loss(pred: Tensor, tgt: Tensor) -> Tensor:
    """The mean squared difference."""
    return (pred - tgt).square().mean()
