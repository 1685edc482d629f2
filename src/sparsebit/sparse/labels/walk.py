"""Walk: run the graph once on an example and find the labels of every value.

A rule per op (rules/) passes labels from inputs to outputs. An op that only moves values runs on the labels
themselves. An op without a rule fixes its inputs, and the report names it. A `Slice` is one axis of a
parameter with its labels. docs/pruning-inside.md explains labels, classes, dimensions, walks and cuts with a
picture.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.graph.ops import module_of, op_of, writes_input
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.interpreter import Runner
from sparsebit.sparse.labels.descriptions import is_description
from sparsebit.sparse.labels.labels import FIXED, Labels, stored
from sparsebit.sparse.labels.reasons import has_weights, note_undivided, without_rule
from sparsebit.sparse.labels.rules import CHANNEL_RULES, Rule
from sparsebit.sparse.labels.rules.layers import reads_weight
from sparsebit.sparse.labels.rules.stays_zero import divisors, stays_zero
from sparsebit.sparse.sparse_config import Heads
from sparsebit.sparse.trace.front_end import call_of, traced


@dataclass(eq=False)
class Slice:
    """One axis of a parameter or buffer, and the label of each of its positions."""

    path: str  # features.0.weight
    axis: int
    labels: Tensor
    produces: bool = False  # is it the axis of the channels that the layer makes?


@dataclass(eq=False)
class Walk:
    """The labels of everything in `gm`, found on `example`."""

    gm: fx.GraphModule
    example: Call
    # if channels lie along two axes: remove whole heads, or one dimension of every head
    heads: Heads = "whole"
    labels: Labels = field(default_factory=Labels)
    values: dict[fx.Node, Any] = field(default_factory=dict)  # the value of each node
    of: dict[fx.Node, Any] = field(default_factory=dict)  # the labels of each node, in the same structure
    slices: dict[tuple[str, int], Slice] = field(default_factory=dict)
    sizes: list[tuple[str, str, Tensor]] = field(default_factory=list)  # module path, attribute, labels
    # layer norms: their statistics are over the kept channels
    normed: dict[str, Tensor] = field(default_factory=dict)
    # calls that compute such statistics, by node name
    statistics: dict[str, Tensor] = field(default_factory=dict)
    rules: dict[fx.Node, str] = field(default_factory=dict)  # the rule that handled a node
    # nodes that are zero in the masked model wherever a label is removed
    zero: set[fx.Node] = field(default_factory=set)
    # path of a module in the graph -> path in the user's model
    paths: dict[str, str] = field(default_factory=dict)
    # id of a tensor -> the first path under which it was found
    _owners: dict[int, str] = field(default_factory=dict)
    _indexed: list[tuple[fx.Node, Tensor, int]] = field(default_factory=list)
    _dimensions: list[Tensor] | None = None
    _vanishing: list[bool] = field(default_factory=list)

    @classmethod
    def through(cls, gm: fx.GraphModule, example: Call, heads: Heads = "whole") -> Walk:
        walk = cls(gm, example, heads)
        calls = [n for n in gm.graph.nodes if n.op == "call_module"]
        walk.paths = {str(n.target): str(n.meta.get("path") or n.target) for n in calls}
        _Walker(walk).run_on(example)
        walk._settle()
        note_undivided(walk)
        return walk

    @functools.cached_property
    def divisors(self) -> set[str]:
        """Parameters that the graph divides by; they are not masked."""
        return divisors(self.gm)

    # -- what rules use ------------------------------------------------------------------------------
    def module(self, node: fx.Node) -> Any:
        return module_of(node, self.gm)

    def tensor(self, path: str) -> Tensor:
        """A parameter or buffer of the graph."""
        return tensor_at(self.gm, path)

    def fixed(self, value: Tensor) -> Tensor:
        return torch.zeros((), dtype=torch.long).expand(value.shape)

    def fix(self, labels: Any, node: fx.Node, why: str) -> None:
        for each in pytree.tree_leaves(labels):
            if isinstance(each, Tensor):
                self.labels.fix(each, f"{where(node)}: {why}")

    def keep(self, node: fx.Node, why: str) -> None:
        """Keep the channels of a layer that has no labels."""
        self.fix(self.labels.fresh(1), node, why)

    def make(self, node: fx.Node, n: int, axis: int) -> tuple[Tensor, Tensor]:
        """Fresh labels for `n` channels on `axis` of the value: (labels, labels of the value)."""
        # a single channel is kept
        if n > 1:
            new = self.labels.fresh(n)
        else:
            new = torch.zeros(1, dtype=torch.long)
        return new, self.spread(node, new, axis)

    def spread(self, node: fx.Node, vector: Tensor, axis: int) -> Tensor:
        shape = self.values[node].shape
        line = [1] * len(shape)
        line[axis] = -1
        return vector.view(line).expand(shape)

    def slice(self, path: str, axis: int, labels: Tensor, produces: bool = False) -> None:
        """`labels` cut this axis. A module that is called twice is cut the same way both times."""
        known = self.known(path, axis)
        if known is None:
            self.slices[self._owner(path), axis] = Slice(self._owner(path), axis, labels, produces)
        elif known.labels is not labels:
            self.labels.join(known.labels, labels)

    def known(self, path: str, axis: int) -> Slice | None:
        """The slice of this axis, under the first path of the parameter (weights may be tied)."""
        return self.slices.get((self._owner(path), axis))

    def _owner(self, path: str) -> str:
        return self._owners.setdefault(id(tensor_at(self.gm, path)), path)

    def size(self, module: str, attribute: str, labels: Tensor) -> None:
        """After the cut, the attribute is the number of kept `labels`."""
        self.sizes.append((module, attribute, labels))

    def must_not_vary(self, node: fx.Node, labels: Tensor, axis: int) -> None:
        """A single position is read from `axis`, so nothing may be cut from it. It is checked at the end."""
        self._indexed.append((node, labels, axis % labels.dim()))

    def settle_heads(self, labels: Tensor, dimensions: Collection[int]) -> set[int]:
        """The axes with channels, after the labels along `dimensions`, or along the other axes (heads), were
        joined."""
        axes = {*self.labels.varies(labels)}
        inside = axes & {*dimensions}
        heads = axes - {*dimensions}
        if inside and heads:
            self.labels.whole(labels, sorted(inside if self.heads == "whole" else heads))
            axes = {*self.labels.varies(labels)}
        return axes

    # -- the end -------------------------------------------------------------------------------------
    def _settle(self) -> None:
        """A tensor can be cut along one axis only: join the labels along the others, until nothing changes."""
        reads = [n for n in self.gm.graph.nodes if n.op == "get_attr" and isinstance(self.of[n], Tensor)]
        for node in reads:  # parameters that the graph reads beside a module that holds them
            self.labels.at = where(node)
            for axis in range(self.of[node].dim()):
                known = self.known(str(node.target), axis)
                if known is not None:
                    self.labels.join(known.labels, self.labels.along(self.of[node], axis))
        while self._resolve_axes():
            pass
        for node in reads:
            for axis in self.labels.varies(self.of[node]):
                self.slice(str(node.target), axis, self.labels.along(self.of[node], axis))

    def _resolve_axes(self) -> bool:
        changed = False
        for node, labels, axis in self._indexed:
            self.labels.at = where(node)
            axes = self.labels.varies(labels)
            if axis in axes and len(axes) > 1:
                self.labels.join(labels, labels.narrow(axis, 0, 1))
                changed = True
            elif axis in axes:
                self.fix(labels, node, "takes a single position of the axis")
                changed = True
        for labels in pytree.tree_leaves(list(self.of.values())):
            if isinstance(labels, Tensor):
                axes = self.labels.varies(labels)
            else:
                axes = []
            if len(axes) > 1:
                best = max(axes, key=lambda d: self._parts(labels, d))
                self.labels.along(labels, best if self.heads == "whole" else axes[-1])
                changed = True
        return changed

    def _parts(self, labels: Tensor, axis: int) -> tuple[int, int]:
        """The number of parts that remain to choose from along `axis` if the other axes are joined.

        Parts that layers make count first: rows of a table that the example does not reach are no channels.
        """
        trial = Labels()
        trial._parent = self.labels._parent.clone()
        trial._flat = self.labels._flat
        parts = trial.roots(trial.along(labels, axis)).unique()
        made = [trial.roots(part.labels) for part in self.slices.values() if part.produces]
        if made:
            known = torch.isin(parts, torch.cat(made)) & (parts != FIXED)
        else:
            known = parts[:0]
        return int(known.sum()), len(parts)

    # -- results -------------------------------------------------------------------------------------
    def dimensions(self) -> list[Tensor]:
        """Classes that compete: the same layers make and read them, in the same values. Fixed classes are
        left out.

        One class of each dimension is kept, so no layer and no value loses everything.
        """
        if self._dimensions is None:
            self._dimensions = self._find_dimensions()
        return self._dimensions

    def _find_dimensions(self) -> list[Tensor]:
        values = (t for t in pytree.tree_leaves(list(self.of.values())) if isinstance(t, Tensor))
        cuts = [cut.labels for cut in self.slices.values()]
        places: dict[int, list[int]] = {}
        for i, labels in enumerate([*cuts, *(stored(t)[0] for t in values)]):
            for root in self.labels.roots(labels).unique().tolist():
                places.setdefault(root, []).append(i)
        found: dict[tuple[int, ...], list[int]] = {}
        for root, where in places.items():
            if root != FIXED and where[0] < len(cuts):  # a parameter has this class
                found.setdefault(tuple(where), []).append(root)
        self._vanishing = _that_may_vanish(list(found), set(places.get(FIXED, ())))
        return [torch.tensor(sorted(roots)) for roots in found.values()]

    def may_vanish(self) -> list[bool]:
        """For each dimension, would every layer and value still have channels without it?

        Dimensions are considered together, so that the rest is enough: the channels of a zero-padded shortcut
        may vanish.
        """
        self.dimensions()
        return self._vanishing


def _that_may_vanish(places: list[tuple[int, ...]], fixed: set[int]) -> list[bool]:
    """`places` are the axes and values of each dimension. A dimension that is the only one somewhere never
    vanishes."""
    inside = Counter(i for where in places for i in where)
    needed = []
    for where in places:
        needed.append(any(inside[i] == 1 and i not in fixed for i in where))
    kept = fixed.union(*(where for where, stays in zip(places, needed) if stays))
    return [not stays and kept.issuperset(where) for where, stays in zip(places, needed)]


def where(node: fx.Node) -> str:
    path = node.meta.get("path")
    if path == "":
        return "the model"
    return str(path or node.name)


def tensor_at(model: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    found: Tensor = getattr(model.get_submodule(owner), name)
    return found


def _tensors(value: Any) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)]


def _takes(rule: Rule, *args: Any, **kwargs: Any) -> bool:
    """A call with arguments that the rule does not know counts as a call without a rule."""
    try:
        inspect.signature(rule).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def walk_of(model: nn.Module, example: Any, heads: Heads = "whole") -> Walk:
    """The labelled graph of `model`."""
    call = call_of(example, model)
    return Walk.through(traced(model, call).eval(), call, heads)


class _Walker(Runner):
    """Runs the example and the rules, node by node."""

    def __init__(self, walk: Walk):
        super().__init__(walk.gm)
        self.walk = walk

    def run_node(self, n: fx.Node) -> Any:
        walk = self.walk
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        value = getattr(self, n.op)(n.target, args, kwargs)
        walk.values[n] = value
        walk.of[n] = self._labels(n, value)
        if stays_zero(walk, n):
            walk.zero.add(n)
        elif writes_input(n, walk.gm):
            self._not_zero(n)
        return value

    def _not_zero(self, node: fx.Node) -> None:
        """After a write, every value in the same memory may be other than zero."""
        place = lambda n: {t.untyped_storage().data_ptr() for t in _tensors(self.walk.values[n])}
        written = set().union(*map(place, node.all_input_nodes))
        self.walk.zero -= {n for n in self.walk.zero if place(n) & written}

    def _labels(self, node: fx.Node, value: Any) -> Any:
        walk = self.walk
        walk.labels.at = where(node)
        if node.op == "output":
            walk.fix(fx.map_arg(node.args, lambda n: walk.of[n]), node, "is an output of the model")
            return None
        if node.op == "get_attr":
            return self._parameter(node, value)
        real = lambda n: walk.values[n] if walk.of[n] is None else walk.of[n]
        args = fx.map_arg(node.args, real)
        kwargs = fx.map_arg(node.kwargs, real)
        plain = not _tensors(value) and (not _tensors((args, kwargs)) or is_description(node))
        if node.op == "placeholder" or plain:
            return pytree.tree_map_only(Tensor, walk.fixed, value)
        rule = self._rule(node)
        if rule is not None and _takes(rule, walk, node, *args, **kwargs):
            walk.rules[node] = f"{rule.__module__}.{rule.__name__}"
            found = rule(walk, node, *args, **kwargs)
            if found is not NotImplemented and self._fits(found, value):
                return found
        walk.rules[node] = "none: all that it reads is kept"
        why = without_rule(walk, node)
        walk.fix((args, kwargs), node, why)
        if has_weights(walk, node):
            walk.keep(node, why)
        return pytree.tree_map_only(Tensor, walk.fixed, value)

    def _parameter(self, node: fx.Node, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        users = [user for user in node.users if user.target is not getattr]  # not its dtype or device
        if all(reads_weight(user, node) for user in users):
            return None  # two of its axes are cut: its reader knows which
        known = any(user.op == "output" or self._rule(user) for user in users)
        # the kernel of a convolution whose weight is computed
        kernel = value.dim() > 3 and min(value.shape[:2]) > 1
        if value.numel() < 2 or not value.is_floating_point() or not known or kernel:
            return self.walk.fixed(value)
        return self.walk.labels.fresh(value.numel()).view(value.shape)

    def _rule(self, node: fx.Node) -> Rule | None:
        op = op_of(node, self.walk.gm)
        if node.op == "call_module" and hasattr(self.walk.module(node), "parametrizations"):
            return None  # its weight is computed
        if isinstance(op, type) and issubclass(op, nn.Module):
            kinds: Sequence[Any] = op.__mro__
        else:
            kinds = [op]
        return next((CHANNEL_RULES[kind] for kind in kinds if kind in CHANNEL_RULES), None)

    @staticmethod
    def _fits(labels: Any, value: Any) -> bool:
        ours = pytree.tree_leaves(labels)
        theirs = pytree.tree_leaves(value)
        return len(ours) == len(theirs) and all(
            not isinstance(v, Tensor) or (isinstance(x, Tensor) and x.shape == v.shape)
            for x, v in zip(ours, theirs)
        )
