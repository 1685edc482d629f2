"""MovingAverage: exponential moving average over images of each image's smallest and largest value.

    ema <- r * ema + (1 - r) * image,  the first image starts it;  [1, 2, 3, 10] -> 2.161 with r = 0.9

By definition it depends on the order of images. Merging is still exact: after n images ema is
r^(n-1) * first + tail, so (n, first, tail) is all that a later part needs to be appended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from sparsebit.config import Config
from sparsebit.quantization.observers import register_observer
from sparsebit.quantization.observers.base import ImageObserver

if TYPE_CHECKING:
    from typing_extensions import Self


@register_observer
class MovingAverageObserver(ImageObserver):
    TYPE = "moving_average"

    class Params(Config):
        ema_ratio: float = Field(0.9, ge=0, lt=1, description="share of the average that each image leaves")

    def reset(self) -> None:
        super().reset()
        self.images = 0
        self.first: Tensor | None = None  # (2, channels): smallest and largest values of the first image
        self.tail: Tensor | None = None

    def accumulate_images(self, low: Tensor, high: Tensor) -> None:
        ranges = torch.stack([low, high], 1)  # (images, 2, channels)
        later = ranges[1:]
        age = torch.arange(len(later) - 1, -1, -1, dtype=torch.float64, device=later.device)
        ratio = float(self.params.ema_ratio)
        weight = (1 - ratio) * ratio**age
        self._append(ranges[0], torch.tensordot(weight, later, 1), len(ranges))

    def _append(self, first: Tensor, tail: Tensor, images: int) -> None:
        ratio = float(self.params.ema_ratio)
        if self.first is None or self.tail is None:
            self.first = first
            self.tail = tail
        else:  # the first image of the later part is an ordinary one now
            first = first.to(self.tail.device)
            tail = tail.to(self.tail.device)
            self.tail = ratio**images * self.tail + (1 - ratio) * ratio ** (images - 1) * first + tail
        self.images += images

    def calc_minmax(self) -> tuple[Tensor, Tensor]:
        low, high = self.seen_range()
        if self.first is None or self.tail is None:
            return low, high
        low, high = (float(self.params.ema_ratio) ** (self.images - 1) * self.first + self.tail).float()
        return low, high

    def merge(self, other: Self) -> None:
        """Add the batches of `other`, as if they had come after those of this observer."""
        super().merge(other)
        if other.first is not None and other.tail is not None:
            self._append(other.first, other.tail, other.images)


Observer = MovingAverageObserver
