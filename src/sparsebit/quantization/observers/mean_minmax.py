"""MeanMinMax: the mean over images of the smallest and largest value of each. Outlier images count little.

A mean over images with few values would clip most of them, so images can be taken together until a group has
MIN_VALUES values; a batch smaller than one group counts with its full range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from sparsebit.config import Config
from sparsebit.quantization.observers import register_observer
from sparsebit.quantization.observers.base import ImageObserver
from sparsebit.quantization.observers.ranks import RunningSum

if TYPE_CHECKING:
    from typing_extensions import Self


@register_observer
class MeanMinMaxObserver(ImageObserver):
    TYPE = "mean_minmax"

    class Params(Config):
        min_values: int = Field(1, ge=1, description="images with fewer values are taken together")

    def reset(self) -> None:
        super().reset()
        self.low_sum = RunningSum()  # over groups of images
        self.high_sum = RunningSum()
        self.low_floor: Tensor | None = None  # range of the batches that are smaller than a group
        self.high_floor: Tensor | None = None

    def accumulate_images(self, low: Tensor, high: Tensor) -> None:
        per_group = -(-self.params.min_values // max(self.values_per_image, 1))
        if per_group > len(low):
            self._widen(low.amin(0), high.amax(0))
            return
        if per_group > 1:
            groups = len(low) // per_group
            low = torch.stack([part.amin(0) for part in low.tensor_split(groups)])
            high = torch.stack([part.amax(0) for part in high.tensor_split(groups)])
        self.low_sum.add(low.sum(0), len(low))
        self.high_sum.add(high.sum(0), len(high))

    def _widen(self, low: Tensor, high: Tensor) -> None:
        if self.low_floor is None:
            self.low_floor = low
        else:
            self.low_floor = torch.minimum(low, self.low_floor.to(low.device))
        if self.high_floor is None:
            self.high_floor = high
        else:
            self.high_floor = torch.maximum(high, self.high_floor.to(high.device))

    def calc_minmax(self) -> tuple[Tensor, Tensor]:
        low, high = self.seen_range()
        if not self.low_sum.empty:
            low = self.low_sum.mean().float()
            high = self.high_sum.mean().float()
            if self.low_floor is not None and self.high_floor is not None:
                low = torch.minimum(low, self.low_floor.float().to(low.device))
                high = torch.maximum(high, self.high_floor.float().to(high.device))
        return low, high

    def merge(self, other: Self) -> None:
        super().merge(other)
        self.low_sum.merge(other.low_sum)
        self.high_sum.merge(other.high_sum)
        if other.low_floor is not None and other.high_floor is not None:
            self._widen(other.low_floor, other.high_floor)


Observer = MeanMinMaxObserver
