"""How close a changed graph still is to the whole one: batches as often as they are wanted, values inside, errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.graph.feeding import as_call, as_iterable, signature_of, to_device, tracked
from sparsebit.sparse.running import Call, Runner


class Batches:
    """The arguments of every batch, on the device of the model, as often as they are wanted."""

    def __init__(self, gm: fx.GraphModule, batches: Any, progress: bool | None, what: str):
        if isinstance(batches, Iterator):
            raise ConfigError(
                f"{what}: batches are read several times; pass a list or a loader, not a generator"
            )
        self.batches, self.signature = as_iterable(batches), signature_of(gm)
        self.progress, self.what = progress, what
        self.device = next((p.device for p in gm.parameters()), torch.device("cpu"))

    def __iter__(self) -> Iterator[Call]:
        empty = True
        for batch in tracked(self.batches, self.progress, self.what):
            empty = False
            args, kwargs = as_call(batch, self.signature)
            yield to_device(args, self.device), to_device(kwargs, self.device)
        if empty:
            raise CalibrationError("no data: `batches` is empty; a few dozen samples are enough")


class _Seen(Runner):
    """Keeps some values as they are computed: an activation in place would write over them."""

    def __init__(self, gm: fx.GraphModule, names: set[str]):
        super().__init__(gm)
        self.extra_traceback = False  # _SeenAll is no error
        self.names = names
        self.seen: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.names:
            self.seen[n.name] = value.clone()
            if len(self.seen) == len(self.names):
                raise _SeenAll
        return value


class _SeenAll(Exception):
    """The rest of the graph need not run."""


def values_at(gm: fx.GraphModule, names: set[str], call: Call) -> dict[str, Tensor]:
    run = _Seen(gm, names)
    with contextlib.suppress(_SeenAll):
        run.run_on(gm, call)
    return run.seen


@torch.no_grad()
def errors_of(whole: fx.GraphModule, trials: list[fx.GraphModule], calls: Batches) -> list[float]:
    """How far the output of each is from that of `whole`, relative to its power."""
    errors, power = [0.0] * len(trials), 0.0
    for args, kwargs in calls:
        want = _floats(whole(*args, **kwargs))
        power += sum(float(x.square().sum()) for x in want)
        for i, trial in enumerate(trials):
            got = _floats(trial(*args, **kwargs))
            errors[i] += sum(float((a - b).square().sum()) for a, b in zip(got, want))
    return [error / max(power, 1e-30) for error in errors]


def _floats(output: Any) -> list[Tensor]:
    return [x.double() for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
