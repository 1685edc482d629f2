"""A few calibration batches, spread over all of them, to measure what a choice does to the outputs of the model."""

from __future__ import annotations

from torch import Tensor
from torch.utils import _pytree as pytree

from sparsebit.graph.run.calls import Call

ENOUGH = 8  # rows, rounded up to whole batches


class Samples:
    """Every batch at first, then every second, every fourth ...: a constant number, from the whole of the data."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._seen = 0
        self._stride = 1

    def see(self, call: Call) -> None:
        """Keep a copy of the batch, if it is one of the chosen."""
        if self._seen % self._stride == 0:
            self.calls.append(call.copy())
            rows = sum(rows_of(kept) for kept in self.calls)
            if rows >= 2 * ENOUGH and len(self.calls) > 1:
                self.calls = self.calls[::2]
                self._stride *= 2
        self._seen += 1


def rows_of(call: Call) -> int:
    """The number of samples of a call: the first axis of its first tensor."""
    tensors = [x for x in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(x, Tensor) and x.dim()]
    return len(tensors[0]) if tensors else 1
