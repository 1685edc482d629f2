"""MSE: the range whose grid has the least squared error, of rounding inside and clipping outside."""

from __future__ import annotations

from torch import Tensor

from sparsebit.numeric.search import mse_range
from sparsebit.quantization.observers import register_observer
from sparsebit.quantization.observers.base import HistogramObserver

MANTISSA = 6  # 64 bins per octave describe the error of any grid well enough


@register_observer
class MSEObserver(HistogramObserver):
    TYPE = "mse"

    def calc_minmax(self) -> tuple[Tensor, Tensor]:
        return mse_range(self.bins(mantissa=MANTISSA), *self.seen_range(), self.spec)


Observer = MSEObserver
