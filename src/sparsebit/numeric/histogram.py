"""Streaming histogram on the grid of floating point itself: a bin is (sign, exponent, first mantissa bits).

The grid does not depend on the data. So merging is adding, the order of batches cannot matter, and an outlier does not
coarsen the other bins (a linear histogram whose range doubles merges as exactly, but leaves 8 of 2048
bins to data with an outlier of 1000 sigma). Kept are the 16 octaves below the largest value; the rest is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebit.numeric.spec import as_channels, channel_axis

OCTAVES = 16  # values below 2^-15 of the largest round to 0 at any width we quantize to
MANTISSA = (5, 10)  # bits of relative resolution: many channels ... one channel
BINS = 2**19  # all channels together, where MANTISSA allows
SAMPLE = 2**16  # values of one tensor that are looked at; small tensors are taken whole
SAMPLE_PER_CHANNEL = 2**12
BLOCK = 2**18  # values in work at a time
LOOP_FROM = 2**15  # aminmax over a whole tensor is vectorised, over a dimension it is not


@dataclass(frozen=True)
class Bins:
    """`count` values between `lo` and `hi`; (channels, bins), ascending. Equal values have lo == hi."""

    lo: Tensor
    hi: Tensor
    count: Tensor

    @property
    def exact(self) -> bool:
        """Single values, not intervals."""
        return self.lo is self.hi

    def __getitem__(self, channels: slice) -> Bins:
        lo = self.lo[channels]
        return Bins(lo, lo if self.exact else self.hi[channels], self.count[channels])

    def total(self) -> Tensor:
        return self.count.sum(1, dtype=torch.float64)

    def kth(self, rank: Tensor) -> Tensor:
        """The rank-th smallest value (1 is the smallest) of each channel; `hi` for the last one in a bin."""
        cum = self.count.cumsum(1, dtype=torch.float64)
        j = (cum < rank[:, None]).sum(1, keepdim=True).clamp_(max=cum.shape[1] - 1)
        lo, hi, count = (t.gather(1, j)[:, 0].double() for t in (self.lo, self.hi, self.count))
        into = (rank - cum.gather(1, j)[:, 0] + count) / count.clamp(min=1)
        return lo + (hi - lo) * into.clamp(0, 1)

    def negated(self) -> Bins:
        lo = -self.hi.flip(1)
        return Bins(lo, lo if self.exact else -self.lo.flip(1), self.count.flip(1))

    def over(self, unit: Tensor) -> Bins:
        """Values divided by one number per channel."""
        lo = self.lo / unit[:, None]
        return Bins(lo, lo if self.exact else self.hi / unit[:, None], self.count)


class Histogram:
    """Counts per channel. Up to `exact` values per channel are kept; then they are counted."""

    def __init__(self, channels: int, exact: int | None = None, device: torch.device | str = "cpu"):
        fine = 0
        if channels * 2 * OCTAVES < BINS:
            fine = int(math.log2(BINS / (2 * OCTAVES * channels)))
        self.mantissa = max(MANTISSA[0], min(MANTISSA[1], fine))
        self.half = OCTAVES << self.mantissa  # bins of one sign; between the signs is the bin of 0
        if exact is None:
            self.limit = min(2 * self.half + 1, 2**13)
        else:
            self.limit = exact
        self.top = torch.full((channels,), OCTAVES, dtype=torch.int32, device=device)  # largest exponent seen
        self.values: list[Tensor] = []
        self.counts: Tensor | None = None

    def add(self, rows: Tensor, low: Tensor, high: Tensor, stride: int = 1) -> None:
        """Count `rows` (channels, samples), float32, whose extremes per channel are `low` and `high`.

        With a stride, every stride-th value stands for that many; the extremes are counted once in any case.
        """
        self._to(rows.device)
        self._raise(torch.maximum(low.abs(), high.abs()).view(torch.int32) >> 23)
        if stride == 1:
            self._add_values([rows])
        else:
            self._count(rows[:, ::stride].contiguous(), stride)
            self._count(torch.stack([low, high], 1), 1)

    def merge(self, other: Histogram) -> None:
        """Add the values of `other`, as if they had been added here."""
        self._raise(other.top.to(self.top.device))
        self._add_values([v.to(self.top.device) for v in other.values])
        if other.counts is not None:
            counts = other.counts.to(self.top.device)
            top = other.top.to(self.top.device)
            self._spill().add_(_shift(counts, (self.top - top) << self.mantissa))

    def _add_values(self, rows: list[Tensor]) -> None:
        size = sum(v.shape[1] for v in self.values + rows)
        if self.counts is None and size <= self.limit:
            self.values += [v.clone() for v in rows]
            return
        for v in rows:
            self._count(v, 1)

    def _count(self, rows: Tensor, weight: int) -> None:
        counts = self._spill()
        offset = torch.arange(0, counts.numel(), counts.shape[1], device=counts.device)[:, None]
        for part in rows.split(max(BLOCK // len(rows), 1), 1):
            index = (self._index(part) + offset).reshape(-1)
            counts.view(-1).scatter_add_(0, index, torch.full_like(index, weight))

    def _index(self, rows: Tensor) -> Tensor:
        pattern = rows.view(torch.int32)
        floor = ((self.top + (1 - OCTAVES)) << self.mantissa) - 1
        index = (pattern & 0x7FFFFFFF).bitwise_right_shift_(23 - self.mantissa)
        index.sub_(floor[:, None]).clamp_(min=0)
        sign = pattern >> 31  # 0 or -1; (x ^ -1) + 1 is -x
        return index.bitwise_xor_(sign).sub_(sign).add_(self.half)

    def _spill(self) -> Tensor:
        """Begin to count values instead of keeping them."""
        if self.counts is None:
            self.counts = self.top.new_zeros(len(self.top), 2 * self.half + 1, dtype=torch.int64)
            values = self.values
            self.values = []
            for v in values:
                self._count(v, 1)
        return self.counts

    def _raise(self, top: Tensor) -> None:
        """Make room for exponents up to `top`: the lowest octaves join the bin of 0."""
        top = torch.maximum(self.top, top)
        # a look at the values would make other devices wait
        if self.counts is not None and not (top.is_cpu and torch.equal(top, self.top)):
            self.counts = _shift(self.counts, (top - self.top) << self.mantissa)
        self.top = top

    def _to(self, device: torch.device) -> None:
        if self.top.device != device:
            self.top = self.top.to(device)
            self.values = [v.to(device) for v in self.values]
            if self.counts is None:
                self.counts = None
            else:
                self.counts = self.counts.to(device)

    def bins(self, low: Tensor, high: Tensor, mantissa: int = MANTISSA[1], absolute: bool = False) -> Bins:
        """The observed values (|x| if `absolute`), on at most `mantissa` bits, cut to the true range."""
        if self.counts is None:
            values = torch.cat(self.values, 1)
            values = (values.abs() if absolute else values).sort(1).values
            return Bins(values, values, values.new_ones(1, 1).expand_as(values))
        drop = max(self.mantissa - mantissa, 0)
        bits = self.mantissa - drop
        zero = self.counts[:, self.half, None]
        above = self.counts[:, self.half + 1 :].unflatten(1, (-1, 1 << drop)).sum(-1)
        below = self.counts[:, : self.half].unflatten(1, (-1, 1 << drop)).sum(-1)
        codes = torch.arange((OCTAVES << bits) + 1, dtype=torch.int32, device=zero.device)
        edges = ((codes + ((self.top + (1 - OCTAVES)) << bits)[:, None]) << (23 - bits)).view(torch.float32)
        lo = edges[:, :-1]
        hi = edges[:, 1:]
        none = torch.zeros_like(edges[:, :1])
        if absolute:
            lo = torch.cat([none, lo], 1)
            hi = torch.cat([none, hi], 1)
            count = torch.cat([zero, above + below.flip(1)], 1)
            low, high = torch.zeros_like(low), torch.maximum(low.abs(), high.abs())
        else:
            lo, hi = torch.cat([-hi.flip(1), none, lo], 1), torch.cat([-lo.flip(1), none, hi], 1)
            count = torch.cat([below, zero, above], 1)
        used = count.any(0)
        lo, hi = (t[:, used].clamp(low[:, None], high[:, None]) for t in (lo, hi))
        return Bins(lo, hi, count[:, used].double())


def _shift(counts: Tensor, steps: Tensor) -> Tensor:
    """Counts when the bins of each channel move `steps` towards 0; those that reach it add up there."""
    half = counts.shape[1] // 2
    place = torch.arange(-half, half + 1, device=counts.device)
    index = place.sign() * (place.abs() - steps[:, None]).clamp_(min=0) + half
    return torch.zeros_like(counts).scatter_add_(1, index, counts)


def sample_stride(channels: int, samples: int) -> int:
    """Every how many-th value of a row is looked at. Depends on the shape only, so batch order cannot matter.

    It shares no factor with the row length: no image column, row or channel is seen more often than others.
    """
    want = max(SAMPLE // channels, SAMPLE_PER_CHANNEL)
    stride = max(samples // want, 1)
    while math.gcd(stride, samples) > 1:
        stride += 1
    return stride


def channel_minmax(x: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each channel; NaN wins."""
    axis = channel_axis(x.dim(), axis)
    if axis is None:
        lo, hi = torch.aminmax(as_channels(x, None))
        return lo.reshape(1), hi.reshape(1)
    rest = [d for d in range(x.dim()) if d != axis]
    if rest:
        return (x.amin(rest), x.amax(rest))
    return (x.clone(), x.clone())


def image_minmax(x: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Smallest and largest value per image (axis 0) and channel, as two (images, channels) tensors."""
    axis = channel_axis(x.dim(), axis)
    if axis == 0 or x.dim() == 0:  # no axis left for images
        lo, hi = channel_minmax(x, axis)
        return lo[None], hi[None]
    if axis is not None:
        rest = [d for d in range(1, x.dim()) if d != axis]
        return (x.amin(rest), x.amax(rest)) if rest else (x, x)
    rows = as_channels(x, None).view(len(x), -1)
    if rows.shape[1] < LOOP_FROM:
        return rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    pairs = [torch.aminmax(row) for row in rows]
    return torch.stack([p.min for p in pairs])[:, None], torch.stack([p.max for p in pairs])[:, None]
