"""ACIQ: the clip that suits a Gaussian or Laplace distribution of the measured mean and spread.

Range = mean +- alpha * spread, where alpha balances clipping and rounding (Banner et al., NeurIPS 2019).
Laplace: alpha / (3 4^bits) = exp(-alpha), spread = mean |x - mean|.
Gaussian: alpha / (6 4^bits) = phi(alpha) - alpha Q(alpha), spread = standard deviation.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from sparsebit.config import Config
from sparsebit.numeric.histogram import Bins
from sparsebit.quantization.observers import register_observer
from sparsebit.quantization.observers.base import HistogramObserver

MANTISSA = 7
BELL = 2.0  # one-sided data whose mean is that many deviations away from 0 is a bell, not the half of one


@lru_cache
def clip_alpha(bits: int, distribution: str) -> float:
    """The range at which more rounding costs as much as less clipping saves; by bisection, for any bits."""
    low = 0.0
    high = 100.0
    for _ in range(60):
        a = (low + high) / 2
        if distribution == "laplace":
            rounding = a / (3 * 4.0**bits)
            clipping = math.exp(-a)
        else:
            density = math.exp(-a * a / 2) / math.sqrt(2 * math.pi)
            beyond = math.erfc(a / math.sqrt(2)) / 2
            rounding = a / (6 * 4.0**bits)
            clipping = density - a * beyond
        low, high = (a, high) if rounding < clipping else (low, a)
    return low


@register_observer
class ACIQObserver(HistogramObserver):
    TYPE = "aciq"

    class Params(Config):
        distribution: Literal["gaus", "laplace"] = Field(
            "gaus", description="shape that the values are taken to have"
        )

    def calc_minmax(self) -> tuple[Tensor, Tensor]:
        low, high = self.seen_range()
        bins = self.bins(mantissa=MANTISSA)
        spec = self.spec
        shape = str(self.params.distribution)
        mean, deviation, spread = moments(bins, shape)
        alpha = clip_alpha(spec.bits, shape)
        lo = mean - alpha * spread
        hi = mean + alpha * spread
        # the values of a ReLU are the half of a bell around 0; unsigned codes give that half one bit more
        half = ((low >= 0) | (high <= 0)) & (mean.abs() < BELL * deviation)
        clip = clip_alpha(spec.bits + (not spec.symmetric), shape) * half_spread(bins, shape)
        lo = torch.where(half, -clip, lo)
        hi = torch.where(half, clip, hi)
        return lo.float().maximum(low).clamp(max=0), hi.float().minimum(high).clamp(min=0)


def moments(bins: Bins, shape: str) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation, and the spread that the distribution is scaled by."""
    lo = bins.lo.double()
    hi = bins.hi.double()
    share = bins.count / bins.total()[:, None]
    centre = (lo + hi) / 2
    width = hi - lo
    mean = (centre * share).sum(1)
    away = centre - mean[:, None]
    deviation = ((away.square() + width.square() / 12) * share).sum(1).sqrt()
    return mean, deviation, (away.abs() * share).sum(1) if shape == "laplace" else deviation


def half_spread(bins: Bins, shape: str) -> Tensor:
    """The spread of a bell around 0 with only one half; the exact zeros are the values that ReLU cut off."""
    size = ((bins.lo.double() + bins.hi.double()) / 2).abs()
    count = torch.where(size > 0, bins.count, 0).double()
    total = count.sum(1).clamp(min=1)
    if shape == "laplace":
        return (size * count).sum(1) / total
    return ((size.square() * count).sum(1) / total).sqrt()


Observer = ACIQObserver
