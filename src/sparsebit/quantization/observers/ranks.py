"""What adds up over batches and ranks: sums that do not depend on the order of their parts.

A float64 sum keeps its own rounding error beside it (Knuth's TwoSum), so it is right to about 100 bits: however it is
split over ranks, it comes out the same.
"""

from __future__ import annotations

import torch
from torch import Tensor


def world_size() -> int:
    """The number of ranks that share the work; 1 if torch.distributed is not in use."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


class RunningSum:
    """A sum per channel, and of how many values. What a quantizer keeps of this kind is merged over ranks by itself."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.error: Tensor | None = None  # what rounding took away from `total`
        self.count = 0

    def add(self, values: Tensor, count: int) -> None:
        """`values` are the sums over `count` values each."""
        values = values.double()
        self.count += count
        if self.total is None or self.error is None:
            self.total = values
            self.error = torch.zeros_like(values)
            return
        old = self.total.to(values.device)
        self.total = old + values
        seen = self.total - old
        lost = (old - (self.total - seen)) + (values - seen)
        self.error = self.error.to(values.device) + lost

    def merge(self, other: RunningSum) -> None:
        """Add the sum of `other` to this one."""
        if other.total is None or other.error is None:
            return
        self.add(other.total, other.count)
        assert self.error is not None
        self.error = self.error + other.error.to(self.error.device)

    def divide(self, factor: Tensor) -> None:
        """All values so far, divided by `factor`."""
        if self.total is not None and self.error is not None:
            self.total, self.error = (t / factor.to(t) for t in (self.total, self.error))

    def mean(self) -> Tensor:
        assert self.total is not None and self.error is not None
        return (self.total + self.error) / max(self.count, 1)

    @property
    def empty(self) -> bool:
        return self.total is None
