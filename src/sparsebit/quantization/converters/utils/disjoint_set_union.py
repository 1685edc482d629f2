"""Legacy: disjoint sets with path compression. Elements may carry values, the best along the path to the root."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsebit.errors import GraphError


class DSU:
    """Elements 0 .. nums-1. With `value`, `find(x)` leaves in `value[x]` the best value from x up to its
    root, where `cmp(a, b)` is True if a is better than b.
    """

    def __init__(
        self, nums: int, value: list[Any] | None = None, cmp: Callable[[Any, Any], bool] | None = None
    ):
        if value is not None and (len(value) != nums or cmp is None):
            raise GraphError(
                f"DSU: `value` needs {nums} entries (got {len(value)}) and `cmp` to compare them"
            )
        self.n = nums
        self.value = value
        self.cmp = cmp
        self.parents = list(range(nums))

    def find(self, x: int) -> int:
        path = []
        while self.parents[x] != x:
            path.append(x)
            x = self.parents[x]
        above = x
        for node in reversed(path):
            if (
                self.value is not None
                and self.cmp is not None
                and self.cmp(self.value[above], self.value[node])
            ):
                self.value[node] = self.value[above]
            self.parents[node] = x
            above = node
        return x

    def merge(self, x: int, y: int) -> None:
        """The set of x joins that of y, whose root stays the root."""
        self.parents[self.find(x)] = self.find(y)
