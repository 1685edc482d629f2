"""MinMax: the smallest and the largest value of all batches."""

from __future__ import annotations

from torch import Tensor

from sparsebit.numeric.histogram import channel_minmax
from sparsebit.quantization.observers import register_observer
from sparsebit.quantization.observers.base import Observer as BaseObserver


@register_observer
class MinMaxObserver(BaseObserver):
    TYPE = "minmax"

    def observe(self, x: Tensor) -> None:
        self.see(*channel_minmax(x, self.spec.axis), x)

    def calc_minmax(self) -> tuple[Tensor, Tensor]:
        return self.seen_range()


Observer = MinMaxObserver
