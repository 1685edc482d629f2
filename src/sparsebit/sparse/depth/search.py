"""Remove blocks or branches from a graph one by one: a number of them, those that change it least first, or
named ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Generic, Literal, TypeVar

from torch import fx, nn

from sparsebit.errors import ConfigError
from sparsebit.graph.run.batches import Batches
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.modes import set_training, training_flags
from sparsebit.sparse.trace.front_end import call_of, traced

T = TypeVar("T")
Wanted = int | Literal["auto"] | Sequence[str]  # a number, all that are found, or names


@dataclass(frozen=True)
class Removal(Generic[T]):
    """One kind of removal.

    name   the argument of the user, for messages.
    find   (graph, call) -> the parts that can be removed, by name.
    take   (whole, small, found, calls) removes one of `found` from `small`, which started as `whole`.
    """

    name: str
    find: Callable[[fx.GraphModule, Call], dict[str, T]]
    take: Callable[[fx.GraphModule, fx.GraphModule, list[T], Batches | None], tuple[str, fx.GraphModule]]


def one_by_one(
    removal: Removal[T], model: nn.Module, example: Any, wanted: Wanted, batches: Any, progress: bool | None
) -> tuple[fx.GraphModule, list[str]]:
    """The traced model after all removals, and the names of the removed parts."""
    what = removal.name
    call = call_of(example, model)
    whole = traced(model, call)
    flags = training_flags(whole)
    whole.eval()
    if batches is None and wanted and isinstance(wanted, (int, str)):
        raise ConfigError(f"{what}: the choice is measured: pass batches, or the names")
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
        found = removal.find(small, call)
        if wanted == "auto" and not found:
            break
        if isinstance(name, str) and name not in found:
            raise ConfigError(f"{what}: there is no {name}; the names are {', '.join(found) or 'none'}")
        if not found:
            raise ConfigError(f"{what}: {wanted} should be removed, but only {len(names)} can be")
        if isinstance(name, str):
            tried = [found[name]]
        else:
            tried = [*found.values()]
        with contextlib.nullcontext() if calls is None else calls.named():
            gone, small = removal.take(whole, small, tried, calls)
        names.append(gone)
    set_training(small, flags)
    small.meta["unread"] = whole.meta["unread"]
    return small, names
