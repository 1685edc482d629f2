"""The one progress bar of the library."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
SHOWN: ContextVar[bool | None] = ContextVar("shown", default=None)


@contextmanager
def bars(shown: bool) -> Iterator[None]:
    """Inside, no bar is shown unless `shown`; a program that draws its own line switches nested bars off."""
    token = SHOWN.set(shown)
    try:
        yield
    finally:
        SHOWN.reset(token)


def wants_bar(progress: bool | None) -> bool:
    """Is a bar shown? `progress` decides if it is True or False, then the block of bars(), then whether
    stderr is a terminal."""
    if progress is None:
        progress = SHOWN.get()
    if progress is None:
        return sys.stderr.isatty()
    return progress


def tracked(items: Iterable[T], progress: bool | None, label: str = "calibrating") -> Iterator[T]:
    """The items, with a progress bar on terminals; `progress` True or False decides otherwise.

    Bars inside a tracked loop are off.
    """
    if not wants_bar(progress):
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    total = operator.length_hint(items) or None
    around = SHOWN.get()
    SHOWN.set(False)
    try:
        yield from track(items, label, total=total, console=Console(stderr=True), transient=True)
    finally:
        SHOWN.set(around)  # not reset(): a loop that was left early may end in another context
