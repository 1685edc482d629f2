"""Modules that are imported during a trace see the original functions of torch, without patches.

`torch.utils.checkpoint` loads torch._dynamo on its first call, and torch._dynamo keeps the functions that it
finds.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder(MetaPathFinder):
    """Finds modules like the other finders; the code of a module runs between `undo` and `redo`."""

    def __init__(self, undo: Callable[[], None], redo: Callable[[], None]):
        self.undo = undo
        self.redo = redo
        self.running = 0
        self.thread: int | None = threading.get_ident()  # the thread that traces; None when the trace is done

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((s for finder in finders if (s := finder.find_spec(name, path, target))), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(self, spec.loader)
        return spec


class _Loader(Loader):
    """Wraps the real loader, which many modules may share."""

    def __init__(self, finder: _Finder, real: Any):
        self.finder = finder
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)  # get_source, get_data, ...

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.real.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        for place, name in ((module, "__loader__"), (module.__spec__, "loader")):
            setattr(place, name, self.real)  # for later readers of the module's attributes
        if self.finder.thread != threading.get_ident():  # another thread, or a late import (LazyLoader)
            self.real.exec_module(module)
            return
        if not self.finder.running:
            self.finder.undo()
        self.finder.running += 1
        try:
            self.real.exec_module(module)
        finally:
            self.finder.running -= 1
            if not self.finder.running:
                self.finder.redo()


@contextmanager
def untouched_imports(undo: Callable[[], None], redo: Callable[[], None]) -> Iterator[None]:
    finder = _Finder(undo, redo)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.thread = None
        sys.meta_path.remove(finder)
