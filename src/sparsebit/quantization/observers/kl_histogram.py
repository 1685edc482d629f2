"""KL: the threshold on |x| whose quantized distribution diverges least from the true one (Migacz, GTC 2017).

One-sided data keeps its sign: the range is [0, t] or [-t, 0]; it never exceeds the values that occur.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.numeric.histogram import Bins
from sparsebit.numeric.search import KL_BINS, kl_threshold, linear_histogram
from sparsebit.quantization.observers import register_observer
from sparsebit.quantization.observers.base import HistogramObserver


def get_best_threshold(data: Tensor, bit: int = 8) -> float:
    """Legacy: the threshold on |x| for all values of `data` together, found by the search of this observer.

    Data of both signs has half of the codes for each sign. Data of one sign has all of them.
    """
    values = torch.as_tensor(data).detach().float().flatten()
    sizes = values[values != 0].abs().cpu()
    if not len(sizes):
        return 0.0
    one_sided = bool((values >= 0).all() or (values <= 0).all())
    levels = 2**bit - 1 if one_sided else 2 ** (bit - 1)
    counts = torch.histc(sizes, KL_BINS, 0, float(sizes.max())).double()[None]
    kept = kl_threshold(counts, torch.tensor([levels]))
    return float(kept / KL_BINS * sizes.max())


@register_observer
class KLHistogramObserver(HistogramObserver):
    TYPE = "kl_histogram"

    def calc_minmax(self) -> tuple[Tensor, Tensor]:
        low, high = self.seen_range()
        absmax = torch.maximum(low.abs(), high.abs())
        bins = self.bins(absolute=True)
        count = bins.count.where(bins.hi > 0, 0)  # 0 is on every grid: the zeros of a ReLU have no say
        counts = linear_histogram(Bins(bins.lo, bins.hi, count), absmax)
        threshold = kl_threshold(counts, self._levels(low, high)) / KL_BINS * absmax
        return (-threshold).maximum(low).clamp(max=0), threshold.minimum(high).clamp(min=0)

    def _levels(self, low: Tensor, high: Tensor) -> Tensor:
        """Codes for |x|: all of them if the codes are unsigned and the data has one sign, else half."""
        spec = self.spec
        one_sided = ((low >= 0) | (high <= 0)) & (not spec.symmetric)
        return torch.where(one_sided, spec.levels, 2 ** (spec.bits - 1))


Observer = KLHistogramObserver
