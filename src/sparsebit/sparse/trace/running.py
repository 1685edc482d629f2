"""Running a graph node by node on an example."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from sparsebit.graph.feeding import own_call

Call = tuple[tuple[Any, ...], Mapping[str, Any]]


def leaves(value: Any) -> list[Any]:
    """What is in a value, also in the dataclasses and mappings that torch's pytree does not look into."""
    found = []
    for leaf in pytree.tree_leaves(value):
        inside = dict(leaf) if isinstance(leaf, Mapping) else vars(leaf) if is_dataclass(leaf) else None
        found += [leaf] if inside is None else leaves(inside)
    return found


class Runner(fx.Interpreter):
    """fx.Interpreter that takes arguments as the forward does, and keeps every value unless told otherwise."""

    def __init__(self, gm: fx.GraphModule, garbage_collect_values: bool = False):
        super().__init__(gm, garbage_collect_values)
        self.given: dict[str, Any] = {}

    def run_on(self, gm: fx.GraphModule, example: Call) -> Any:
        """Run on an example of the forward of `gm`, which has the same inputs."""
        self.take(gm, example)
        with torch.no_grad():
            return self.run()

    def take(self, gm: fx.GraphModule, example: Call) -> None:
        """The arguments of a run."""
        args, kwargs = own_call(*example)
        bound = inspect.signature(gm.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        self.given = dict(bound.arguments)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.given[target.lstrip("*")]  # the base class has no way with **kwargs

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """With lists that can be written to, as in the code of the graph."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return _plain(args), _plain(kwargs)


def _plain(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_plain, value))
    if isinstance(value, fx.immutable_collections.immutable_list):
        return list(map(_plain, value))
    if isinstance(value, fx.immutable_collections.immutable_dict):
        return {k: _plain(v) for k, v in value.items()}
    return value
