"""MeanMinMax: the mean over images of the smallest and largest value of each. Outlier images count little."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sparsebit.quantization.observers import register_observer
from sparsebit.quantization.observers.base import ImageObserver

if TYPE_CHECKING:
    from typing_extensions import Self


@register_observer
class MeanMinMaxObserver(ImageObserver):
    TYPE = "mean_minmax"

    def reset(self) -> None:
        super().reset()
        self.images = 0
        self.low_sum: Tensor | None = None
        self.high_sum: Tensor | None = None

    def accumulate_images(self, low: Tensor, high: Tensor) -> None:
        self._add(low.sum(0), high.sum(0), len(low))

    def _add(self, low: Tensor, high: Tensor, images: int) -> None:
        self.low_sum = low if self.low_sum is None else low + self.low_sum.to(low.device)
        self.high_sum = high if self.high_sum is None else high + self.high_sum.to(high.device)
        self.images += images

    def calc_minmax(self) -> tuple[Tensor, Tensor]:
        low, high = self.seen_range()
        if self.low_sum is None or self.high_sum is None:
            return low, high
        return (self.low_sum / self.images).float(), (self.high_sum / self.images).float()

    def merge(self, other: Self) -> None:
        super().merge(other)
        if other.low_sum is not None and other.high_sum is not None:
            self._add(other.low_sum, other.high_sum, other.images)


Observer = MeanMinMaxObserver
