"""Lock-step execution: all batches walk the graph together, node by node.

A `Lane` is one view of the network (float, or quantized so far). It holds every batch's live values, frees
each after its last use, and can keep them on the CPU or on disk. A second lane built on a first one shares
every value that does not differ between the two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.interpreter import Runner, writable
from sparsebit.graph.run.stores import Store


class Lane:
    """Every batch's live values in one view of `gm`. Call `step` for each node of `gm.graph`, in order.

    `base` is another lane, stepped together with this one by `advance(node, [base, lane])`. If the inputs of
    a node are the base's values and `differs(node)` is false, the base's result is shared and not computed
    again.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        batches: Sequence[Call],
        store: Store | None = None,
        base: Lane | None = None,
        differs: Callable[[fx.Node], bool] = lambda node: True,
    ):
        self.gm = gm
        self.base = base
        self.differs = differs
        if base:
            self.store: Store = base.store
        else:
            self.store = store or Store()
        self.values: list[dict[fx.Node, Any]] = [{} for _ in batches]
        self._batches = batches
        self._runner = Runner(gm)
        self._dies_at = _last_uses(gm.graph)

    def inputs(self, node: fx.Node) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Per batch, the real args and kwargs of `node`."""
        for values in self.values:
            yield self._arguments(node, values)

    def outputs(self, node: fx.Node) -> Iterator[Any]:
        for values in self.values:
            yield self.store.get(values[node])

    def step(self, node: fx.Node, keep: bool = False) -> None:
        """Run `node` on every batch, then drop the values without further readers; `keep` keeps the value of
        `node`."""
        self._compute(node)
        self._release(node, keep)

    def _compute(self, node: fx.Node) -> None:
        for i, values in enumerate(self.values):
            shared = self._shared(node, i)
            if shared is None:
                values[node] = self.store.put(self._run(node, i))
            else:
                values[node] = shared[0]

    def _release(self, node: fx.Node, keep: bool = False) -> None:
        for values in self.values:
            for dead in self._dies_at.get(node, ()):
                if not keep or dead is not node:
                    values.pop(dead, None)

    def _shared(self, node: fx.Node, i: int) -> tuple[Any] | None:
        """The base lane's result, if this lane would compute the same."""
        if self.base is None:
            return None
        mine = self.values[i]
        other = self.base.values[i]
        same = all(mine[n] is other[n] for n in node.all_input_nodes)
        if same and not (node.op.startswith("call") and self.differs(node)):
            return (other[node],)
        return None

    def _arguments(self, node: fx.Node, values: dict[fx.Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        real = lambda n: self.store.get(values[n])
        return writable(fx.node.map_arg(node.args, real)), writable(fx.node.map_arg(node.kwargs, real))

    def _run(self, node: fx.Node, i: int) -> Any:
        if node.op == "placeholder":
            return self._bound(i)[str(node.target).lstrip("*")]
        args, kwargs = self._arguments(node, self.values[i])
        if node.op == "output":
            return args[0]
        if node.meta.get("inplace"):  # the node may write into its input, which another lane may share
            args = pytree.tree_map_only(Tensor, torch.clone, args)
        return getattr(self._runner, node.op)(node.target, args, kwargs)

    def _bound(self, i: int) -> dict[str, Any]:
        return Call(*self._batches[i]).bind(inspect.signature(self.gm.forward))


def advance(node: fx.Node, lanes: Sequence[Lane]) -> None:
    """Step several lanes over one node; a base comes before the lanes that build on it."""
    for lane in lanes:
        lane._compute(node)
    for lane in lanes:
        lane._release(node)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values whose last reader it is. A value without a reader is listed under itself."""
    dies: dict[fx.Node, list[fx.Node]] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op != "output":
            last = max(node.users, key=order.__getitem__, default=node)
            dies.setdefault(last, []).append(node)
    return dies
