"""Runner: runs a graph node by node on a call of the user's forward. Other runners build on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sparsebit.graph.run.calls import Call

OnValue = Callable[[fx.Node, Any], None]


class Runner(fx.Interpreter):
    """An fx.Interpreter whose inputs are a Call. It keeps every value until the end by default.

    gm        the graph that runs.
    on_value  is called with each node and its value, right after the node ran.
    """

    def __init__(
        self, gm: fx.GraphModule, on_value: OnValue | None = None, garbage_collect_values: bool = False
    ):
        super().__init__(gm, garbage_collect_values)
        self.on_value = on_value
        self.inputs: dict[str, Any] = {}

    def run_on(self, call: Call) -> Any:
        """The output of the graph on a copy of `call`."""
        self.take(call)
        with torch.no_grad():
            return self.run()

    def take(self, call: Call) -> None:
        """Set the inputs of the next run."""
        self.inputs = call.copy().bind(inspect.signature(self.module.forward))

    def run_flat(self, leaves: Sequence[Any]) -> Any:
        """The output of an exported program, which takes its inputs as a flat list."""
        names = [str(node.target) for node in self.graph.nodes if node.op == "placeholder"]
        self.inputs = dict(zip(names, leaves, strict=True))
        return self.run(enable_io_processing=False)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if self.on_value is not None:
            self.on_value(n, value)
        return value

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An input by its name. The base class cannot pass `**kwargs`."""
        return self.inputs[target.lstrip("*")]

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return writable(args), writable(kwargs)


def writable(value: Any) -> Any:
    """`value` with ordinary lists and dicts: those of a node cannot be changed, and a function may change them."""
    if isinstance(value, fx.immutable_collections.immutable_list):
        return [writable(item) for item in value]
    if isinstance(value, fx.immutable_collections.immutable_dict):
        return {key: writable(item) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(map(writable, value))
    return value


def values_of(gm: fx.GraphModule, call: Call) -> dict[str, Any]:
    """A copy of the value of every node, by the name of the node."""
    values: dict[str, Any] = {}

    def keep(node: fx.Node, value: Any) -> None:
        values[node.name] = pytree.tree_map_only(Tensor, torch.clone, value)

    Runner(gm, keep).run_on(call)
    return values
