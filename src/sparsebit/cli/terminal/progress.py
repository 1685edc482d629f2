"""Signs of life on terminals: a line with the time while a step lasts, and a count where batches are read."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sparsebit.utils.progress import Show, bar


@contextmanager
def status(text: str, batches: list[Any] | None = None) -> Iterator[Any]:
    """A line that lasts as long as the work inside. It gives `batches` back, which move the bar when they are read."""
    total = None
    if batches:
        total = len(batches)
    with bar(text, total) as show:
        if batches is None:
            yield None
        else:
            yield _Counted(batches, text, show)


def start() -> None:
    """Load torch, which takes seconds, under a sign of life. Commands call it when their cheap checks are done."""
    if "torch" not in sys.modules:
        with status("starting"):
            import torch  # noqa: F401


class _Counted(list[Any]):
    """Batches that move a bar, from its start in every pass."""

    def __init__(self, batches: Iterable[Any], text: str, show: Show):
        super().__init__(batches)
        self.text = text
        self.show = show

    def __iter__(self) -> Iterator[Any]:
        for done, batch in enumerate(super().__iter__()):
            self.show(done, self.text)
            yield batch
        self.show(len(self), self.text)
