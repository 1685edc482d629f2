"""SmoothQuant: large activations are made smaller, their weights larger: 8 bits hold both (Xiao et al., 2022).

y = (x / s) (W s)^T with s_j = max |x_j|^alpha / max |W_j|^(1 - alpha).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.solvers.awq import tied
from sparsebit.numeric.solvers.gptq import Statistics
from sparsebit.numeric.solvers.rtn import rtn
from sparsebit.numeric.spec import QuantSpec


@dataclass(frozen=True)
class PeakStatistics(Statistics):
    """Statistics with the largest |x| of each input."""

    peak: Tensor | None = None


def smoothquant(
    weight: Tensor,
    statistics: Statistics | None,
    spec: QuantSpec,
    *,
    clip: str = "minmax",
    scale_dtype: torch.dtype = torch.float16,
) -> QuantizedWeight:
    """The second half: `weight` (scaled already), rounded to nearest."""
    return rtn(weight, None, spec, clip=clip, scale_dtype=scale_dtype)


def smooth_scales(
    weights: Sequence[Tensor],
    statistics: Statistics,
    specs: Sequence[QuantSpec],
    tie: Tensor | None = None,
    *,
    alpha: float = 0.5,
    scale_dtype: torch.dtype = torch.float16,
) -> Tensor:
    """(inputs,): what the inputs of these layers are divided by; channels with one number in `tie` share a scale."""
    if not 0 <= alpha <= 1:
        raise ConfigError(
            f"alpha: from 0 (all range in the activations) to 1 (all in the weights), got {alpha}"
        )
    peak = getattr(statistics, "peak", None)
    if peak is None:
        raise ConfigError("statistics: smoothquant needs the largest value of each input (PeakStatistics)")
    largest = torch.stack([w.detach().float().abs().amax(0) for w in weights]).amax(0)
    s = peak.float().clamp(min=1e-5) ** alpha / largest.clamp(min=1e-5) ** (1 - alpha)
    alive = (peak > 0) & (largest > 0)
    return tied(torch.where(alive, s, s[alive].mean() if bool(alive.any()) else 1.0), tie)


def round_tokens(x: Tensor) -> Tensor:
    """Each token on its own symmetric grid of 8 bits: round(x / s) s with s = max |x| / 127.5."""
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    scale = torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
    return (x / scale).round().clamp(-128, 127) * scale
