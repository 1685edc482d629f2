"""How far a changed graph is from the whole one: values of nodes, and errors of the output."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.interpreter import Runner


class _SeenAll(Exception):
    """The rest of the graph need not run."""


def values_at(gm: fx.GraphModule, names: set[str], call: Call) -> dict[str, Tensor]:
    """Copies of the values of some nodes. The run ends when the last of them is known."""
    seen: dict[str, Tensor] = {}

    def keep(node: fx.Node, value: Any) -> None:
        if node.name in names:
            seen[node.name] = value.clone()  # an activation in place may write over it
            if len(seen) == len(names):
                raise _SeenAll

    runner = Runner(gm, keep)
    runner.extra_traceback = False  # _SeenAll is not an error
    with contextlib.suppress(_SeenAll):
        runner.run_on(call)
    return seen


@torch.no_grad()
def errors_of(whole: fx.GraphModule, trials: list[fx.GraphModule], calls: Iterable[Call]) -> list[float]:
    """The squared error of the output of each trial, relative to the power of the output of `whole`."""
    errors = [0.0] * len(trials)
    power = 0.0
    for args, kwargs in calls:
        want = _floats(whole(*args, **kwargs))
        power += sum(float(x.square().sum()) for x in want)
        for i, trial in enumerate(trials):
            got = _floats(trial(*args, **kwargs))
            errors[i] += sum(float((a - b).square().sum()) for a, b in zip(got, want))
    return [error / max(power, 1e-30) for error in errors]


def _floats(output: Any) -> list[Tensor]:
    return [x.double() for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
