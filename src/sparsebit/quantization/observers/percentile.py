"""Percentile: cuts ALPHA of the positive values at the top and ALPHA of the negative ones at the bottom."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from sparsebit.config import Config
from sparsebit.quantization.observers import register_observer
from sparsebit.quantization.observers.base import HistogramObserver


@register_observer
class PercentileObserver(HistogramObserver):
    TYPE = "percentile"

    class Params(Config):
        alpha: float = Field(
            0.001, ge=0, lt=1, description="fraction of the values of each sign that is cut off"
        )

    def calc_minmax(self) -> tuple[Tensor, Tensor]:
        bins = self.bins()
        alpha = float(self.params.alpha)
        total = bins.total()
        negative = torch.where(bins.lo < 0, bins.count, 0).sum(1, dtype=torch.float64)
        positive = total - negative
        high = bins.kth(total - (positive * alpha).round())
        low = -bins.negated().kth(total - (negative * alpha).round().clamp(min=1) + 1)
        return low.where(negative > 0, 0).float(), high.where(positive > 0, 0).float()


Observer = PercentileObserver
