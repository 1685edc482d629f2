"""Signs of life on terminals, and nowhere else: a spinner with the time, and a bar where something counts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def status(text: str, batches: list[Any] | None = None) -> Iterator[Any]:
    """Shown as long as the work inside lasts; gives `batches` back, which move the bar when they are read.

    Bars of the library are off meanwhile: two of them would fight for the line.
    """
    if not sys.stderr.isatty():
        yield batches
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    terminal = sys.stderr
    counting = (MofNCompleteColumn(),) if batches else ()  # a bar that cannot know its end moves to and fro
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), *counting, Elapsed())
    console = Console(file=terminal)
    shown = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    with shown:
        task = shown.add_task(text, total=len(batches) if batches else None)
        sys.stderr = _NoTerminal(terminal, console)
        try:
            yield None if batches is None else _Counted(batches, shown, task)
        finally:
            sys.stderr = terminal


def start() -> None:
    """Load torch, which takes seconds, under a sign of life; commands call it when cheap checks are done."""
    if "torch" not in sys.modules:
        with status("starting"):
            import torch  # noqa: F401


class _Counted(list[Any]):
    """Batches that move a bar, from its start in every pass."""

    def __init__(self, batches: Iterable[Any], shown: Any, task: Any):
        super().__init__(batches)
        self.shown, self.task = shown, task

    def __iter__(self) -> Iterator[Any]:
        self.shown.update(self.task, completed=0)
        for batch in super().__iter__():
            yield batch
            self.shown.advance(self.task)


class _NoTerminal:
    """A stream that says it is no terminal; whole lines are put above the bar."""

    def __init__(self, stream: Any, console: Any):
        self._stream, self._console, self._line = stream, console, ""

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
