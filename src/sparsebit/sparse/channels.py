"""Which channels go together: the graph is walked once on an example, values beside labels (labels.py).

A rule per op (channel_rules/) says how labels pass through it; an op that only moves values is simply run on the
labels. An op without a rule fixes what it reads, and the report says so. `Slices` are the parameters that a label
cuts, and where.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.graph.ops import module_of, op_of
from sparsebit.sparse.channel_rules import CHANNEL_RULES, Rule
from sparsebit.sparse.labels import FIXED, Labels

Call = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(eq=False)
class Slice:
    """One axis of a parameter or buffer, and the label of each of its positions."""

    path: str  # features.0.weight
    axis: int
    labels: Tensor
    produces: bool = False  # the axis of the channels that the layer makes


@dataclass
class Walk:
    """The labels of everything in `gm`, found on `example`."""

    gm: fx.GraphModule
    example: Call
    labels: Labels = field(default_factory=Labels)
    values: dict[fx.Node, Any] = field(default_factory=dict)  # what each node computed
    of: dict[fx.Node, Any] = field(default_factory=dict)  # its labels, in the same structure
    slices: dict[tuple[str, int], Slice] = field(default_factory=dict)
    sizes: list[tuple[str, str, Tensor]] = field(default_factory=list)  # module path, attribute, labels
    normed: dict[str, Tensor] = field(default_factory=dict)  # layer norms: statistics are over what is kept
    _indexed: list[tuple[fx.Node, Tensor, int]] = field(default_factory=list)

    @classmethod
    def through(cls, gm: fx.GraphModule, example: Call) -> Walk:
        walk = cls(gm, example)
        run_bound(_Walker(walk), walk)
        walk._settle()
        return walk

    # -- what rules use ------------------------------------------------------------------------------
    def module(self, node: fx.Node) -> Any:
        return module_of(node, self.gm)

    def fixed(self, value: Tensor) -> Tensor:
        return torch.zeros(value.shape, dtype=torch.long)

    def fix(self, labels: Any, node: fx.Node, why: str) -> None:
        for each in pytree.tree_leaves(labels):
            if isinstance(each, Tensor):
                self.labels.fix(each, f"{node.meta.get('path') or node.name}: {why}")

    def make(self, node: fx.Node, n: int, axis: int) -> tuple[Tensor, Tensor]:
        """Fresh labels for `n` channels on `axis` of the node's value: (labels, the value's labels)."""
        new = self.labels.fresh(n) if n > 1 else torch.zeros(1, dtype=torch.long)  # a single channel stays
        return new, self.spread(node, new, axis)

    def spread(self, node: fx.Node, vector: Tensor, axis: int) -> Tensor:
        shape = self.values[node].shape
        line = [1] * len(shape)
        line[axis] = -1
        return vector.view(line).expand(shape)

    def slice(self, path: str, axis: int, labels: Tensor, produces: bool = False) -> None:
        """`labels` cut this axis; a module that is called twice is cut the same both times."""
        known = self.slices.setdefault((path, axis), Slice(path, axis, labels, produces))
        if known.labels is not labels:
            self.labels.join(known.labels, labels)

    def size(self, module: str, attribute: str, labels: Tensor) -> None:
        """The attribute is the number of `labels` that are kept."""
        self.sizes.append((module, attribute, labels))

    def must_not_vary(self, node: fx.Node, labels: Tensor, axis: int) -> None:
        """A position is taken from `axis`: nothing may be cut from it. Looked at in the end."""
        self._indexed.append((node, labels, axis % labels.dim()))

    # -- the end -------------------------------------------------------------------------------------
    def _settle(self) -> None:
        """Only what lies along one axis can be cut from a tensor: join the rest, until nothing changes."""
        changed = True
        while changed:
            changed = False
            for node, labels, axis in self._indexed:
                if axis in self.labels.varies(labels):
                    self.fix(labels, node, "takes a single position of the axis")
                    changed = True
            for labels in pytree.tree_leaves(list(self.of.values())):
                axes = self.labels.varies(labels) if isinstance(labels, Tensor) else []
                if len(axes) > 1:
                    self.labels.along(labels, max(axes, key=lambda d: self._parts(labels, d)))
                    changed = True
        for node in self.gm.graph.nodes:  # parameters that the graph reads by itself
            read = self.of[node]
            if node.op == "get_attr" and isinstance(read, Tensor):
                for axis in self.labels.varies(read):
                    self.slice(str(node.target), axis, self.labels.along(read, axis))

    def _parts(self, labels: Tensor, axis: int) -> int:
        """How many parts would be left to choose from along `axis`, if the other axes were joined."""
        trial = Labels()
        trial._parent, trial._flat = self.labels._parent.clone(), self.labels._flat
        return len(trial.roots(trial.along(labels, axis)).unique())

    # -- results -------------------------------------------------------------------------------------
    def keeps(self, labels: Tensor, dropped: Tensor) -> Tensor:
        """Which of `labels` are kept when the classes `dropped` go."""
        return ~torch.isin(self.labels.roots(labels), dropped)

    def dimensions(self) -> list[Tensor]:
        """Classes that compete with each other, because the same layers make and read them; without the fixed ones.

        One of each stays, so that no layer loses everything.
        """
        makers: dict[int, list[int]] = {}
        for i, cut in enumerate(self.slices.values()):
            for root in self.labels.roots(cut.labels).unique().tolist():
                if root != FIXED:
                    makers.setdefault(root, []).append(i)
        found: dict[tuple[int, ...], list[int]] = {}
        for root, layers in makers.items():
            found.setdefault(tuple(layers), []).append(root)
        return [torch.tensor(sorted(roots)) for roots in found.values()]


def run_bound(interpreter: fx.Interpreter, walk: Walk) -> Any:
    """Run a graph with the signature of `walk.gm` on its example."""
    args, kwargs = walk.example
    bound = inspect.signature(walk.gm.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    with torch.no_grad():
        return interpreter.run(*bound.arguments.values())


class _Walker(fx.Interpreter):
    """Runs the example and the rules, node by node."""

    def __init__(self, walk: Walk):
        super().__init__(walk.gm, garbage_collect_values=False)
        self.walk = walk

    def run_node(self, n: fx.Node) -> Any:
        walk = self.walk
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        value = getattr(self, n.op)(n.target, args, kwargs)
        walk.values[n] = value
        walk.of[n] = self._labels(n, value)
        return value

    def _labels(self, node: fx.Node, value: Any) -> Any:
        walk = self.walk
        if node.op == "output":
            walk.fix(fx.map_arg(node.args, lambda n: walk.of[n]), node, "is an output of the model")
            return None
        if node.op == "get_attr":
            return self._parameter(value)
        if node.op == "placeholder" or not self._has_tensor(value):
            return pytree.tree_map_only(Tensor, walk.fixed, value)
        real = lambda n: walk.values[n] if walk.of[n] is None else walk.of[n]
        args, kwargs = fx.map_arg(node.args, real), fx.map_arg(node.kwargs, real)
        rule = self._rule(op_of(node, walk.gm))
        if rule is not None:
            found = rule(walk, node, *args, **kwargs)
            if found is not NotImplemented and self._fits(found, value):
                return found
        what = node.target if node.op != "call_module" else type(walk.module(node)).__name__
        walk.fix((args, kwargs), node, f"no rule for {getattr(what, '__name__', what)} called like this")
        return pytree.tree_map_only(Tensor, walk.fixed, value)

    def _parameter(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        if value.numel() < 2:
            return self.walk.fixed(value)
        return self.walk.labels.fresh(value.numel()).view(value.shape)

    @staticmethod
    def _rule(op: Any) -> Rule | None:
        kinds = op.__mro__ if isinstance(op, type) and issubclass(op, nn.Module) else [op]
        return next((CHANNEL_RULES[kind] for kind in kinds if kind in CHANNEL_RULES), None)

    @staticmethod
    def _has_tensor(value: Any) -> bool:
        return any(isinstance(v, Tensor) for v in pytree.tree_leaves(value))

    @staticmethod
    def _fits(labels: Any, value: Any) -> bool:
        ours, theirs = pytree.tree_leaves(labels), pytree.tree_leaves(value)
        return len(ours) == len(theirs) and all(
            not isinstance(v, Tensor) or (isinstance(x, Tensor) and x.shape == v.shape)
            for x, v in zip(ours, theirs)
        )
