"""Blocks or branches leave a graph one by one: some, those that change it least first, or those that are named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, Literal, TypeVar

from torch import fx, nn

from sparsebit.errors import ConfigError
from sparsebit.graph.run.batches import Batches
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.modes import set_training, training_flags
from sparsebit.sparse.trace.front_end import call_of, traced

T = TypeVar("T")
Wanted = int | Literal["auto"] | Sequence[str]  # how many, all that are found, or their names


def one_by_one(
    model: nn.Module,
    example: Any,
    wanted: Wanted,
    batches: Any,
    progress: bool | None,
    what: str,
    find: Callable[[fx.GraphModule, Call], dict[str, T]],
    take: Callable[[fx.GraphModule, fx.GraphModule, list[T], Batches | None], tuple[str, fx.GraphModule]],
) -> tuple[fx.GraphModule, list[str]]:
    """The traced model without what `take` took, and the names of that.

    take(whole, small, found, calls) takes one of `found` out of `small`, which was `whole`.
    """
    call = call_of(example, model)
    whole = traced(model, call)
    flags = training_flags(whole)
    whole.eval()
    if batches is None and wanted and isinstance(wanted, (int, str)):
        raise ConfigError(f"{what}: which ones go is measured: pass batches, or their names")
    if batches is None:
        calls = None
    else:
        calls = Batches(whole, batches, progress, what)
    small = whole
    names = list[str]()
    if isinstance(wanted, int):
        steps: Iterable[Any] = range(wanted)
    else:
        steps = wanted
    for name in repeat(0) if wanted == "auto" else steps:
        found = find(small, call)
        if wanted == "auto" and not found:
            break
        if isinstance(name, str) and name not in found:
            raise ConfigError(f"{what}: none is called {name}; there are {', '.join(found) or 'none'}")
        if not found:
            raise ConfigError(f"{what}: {wanted} are to go, but only {len(names)} can")
        if isinstance(name, str):
            tried = [found[name]]
        else:
            tried = [*found.values()]
        with contextlib.nullcontext() if calls is None else calls.named():
            gone, small = take(whole, small, tried, calls)
        names.append(gone)
    set_training(small, flags)
    small.meta["unread"] = whole.meta["unread"]
    return small, names
