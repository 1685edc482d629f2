"""The one progress bar of the library. A bar that is shown switches off the bars of the work inside it."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
Show = Callable[[float, str], None]  # (steps that are done, text)
SHOWN: ContextVar[bool | None] = ContextVar("shown", default=None)


@contextmanager
def bars(shown: bool) -> Iterator[None]:
    """Inside the block, a bar is shown only if `shown`. A program that draws its line itself passes False."""
    around = SHOWN.get()
    SHOWN.set(shown)
    try:
        yield
    finally:
        SHOWN.set(around)  # not reset(): a loop that was left early may end in another context


def wants_bar(progress: bool | None) -> bool:
    """`progress` decides if it is True or False; else the block of bars(); else whether stderr is a terminal."""
    if progress is None:
        progress = SHOWN.get()
    if progress is None:
        progress = sys.stderr.isatty()
    return progress


@contextmanager
def bar(label: str, total: int | None = None, progress: bool | None = None) -> Iterator[Show]:
    """A bar on stderr while the work inside lasts; the function that it gives moves it.

    Without `total` it shows the time only. Lines that are printed to stderr meanwhile appear above it.
    """
    if not wants_bar(progress):
        yield _show_nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns: list[Any] = [SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20)]
    if total is not None:
        columns.append(MofNCompleteColumn())
    columns.append(Elapsed())
    console = Console(stderr=True)
    with bars(False), Progress(*columns, console=console, transient=True, redirect_stdout=False) as drawn:
        task = drawn.add_task(label, total=total)

        def show(done: float, text: str) -> None:
            drawn.update(task, completed=done, description=text)

        yield show


def tracked(items: Iterable[T], progress: bool | None, label: str = "calibrating") -> Iterator[T]:
    """The items, with a bar that moves when one is taken. `progress` is that of `bar`."""
    if not wants_bar(progress):
        yield from items
        return
    total = operator.length_hint(items) or None
    with bar(label, total, True) as show:
        for done, item in enumerate(items):
            show(done, label)
            yield item


def _show_nothing(done: float, text: str) -> None:
    """A bar that is not shown."""
