"""Correct the sizes that a cut graph reads and passes on.

A node that reads a size (`x.shape[1]`) returns the size before the cut, and so does everything computed from
it. A node that takes a size (`view(b, 64)`, `split(32)`, `x[:, :16]`, `pad`) gets it scaled to the channels
that are left. No size of the example is written into the graph, so batch and length stay free, even as
factors of a product.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from sparsebit.graph.ops import argument
from sparsebit.sparse.labels.descriptions import SIZES, call_name
from sparsebit.sparse.labels.rules.moves import axes_of

if TYPE_CHECKING:
    from sparsebit.sparse.cut.surgery import Cut


def rewrite(cut: Cut, gm: fx.GraphModule) -> None:
    """Correct the sizes of `gm`, a copy of the walked graph."""
    sizes = _Sizes(cut, gm.graph)
    before = {node.name: node for node in cut.walk.gm.graph.nodes}
    for node in list(gm.graph.nodes):
        old = before[node.name]
        if node.op == "call_module":
            _unflatten_module(sizes, gm.get_submodule(str(node.target)), old)
        elif node.op.startswith("call"):
            known = REWRITES.get(call_name(node))
            if known is not None and (isinstance(sizes.first(old), Tensor) or call_name(node) in MAKERS):
                known(sizes, node, old)
            sizes.restore(node, old)


MAKERS = {"zeros", "ones"}  # these take only sizes


class _Sizes:
    def __init__(self, cut: Cut, graph: fx.Graph):
        self.cut = cut
        self.graph = graph
        # restored size -> (node that reads it, size after the cut, size before)
        self._read: dict[fx.Node, tuple[fx.Node, int, int]] = {}

    def first(self, old: fx.Node) -> Any:
        """The labels of the first argument."""
        if old.args:
            source = old.args[0]
        else:
            source = old.kwargs.get("input", old.kwargs.get("query"))
        if isinstance(source, fx.Node):
            return self.cut.walk.of[source]
        return None

    def known(self, value: Any) -> Any:
        """The value of an argument before the cut."""
        return fx.map_arg(value, lambda n: self.cut.walk.values[n])

    def was(self, old: fx.Node, place: int, name: str, default: Any = None) -> Any:
        return self.known(argument(old, place, name, default))

    def shapes(self, old: fx.Node) -> tuple[list[int], list[int]]:
        """The shape of the first argument, after the cut and before."""
        labels = self.first(old)
        walk = self.cut.walk
        source = old.args[0] if old.args else None
        if isinstance(labels, Tensor):
            return self.cut.shape(labels), [*labels.shape]
        if (
            not isinstance(source, fx.Node)
            or source.op != "get_attr"
            or not isinstance(walk.values[source], Tensor)
        ):
            return [], []
        before = [*walk.values[source].shape]  # a weight: its slices know the axes
        parts = [walk.known(str(source.target), axis) for axis in range(len(before))]
        return [int(self.cut.keeps(p.labels).sum()) if p else n for p, n in zip(parts, before)], before

    def on_small(self, old: fx.Node) -> Any:
        """The result of the call on a first argument of the new shape."""
        small = torch.empty(self.shapes(old)[0], device="meta")
        args, kwargs = self.known((old.args[1:], {k: v for k, v in old.kwargs.items() if k != "input"}))
        if old.op == "call_method":
            op: Any = getattr(torch.Tensor, str(old.target))
        else:
            op = old.target
        return op(small, *args, **kwargs)

    def new(self, op: Callable[..., Any], *args: Any) -> fx.Node:
        return self.graph.call_function(op, args)

    def scaled(self, given: Any, now: int, before: int, at: fx.Node) -> Any:
        """A node in front of `at` that turns `given` from the size `before` to the size `now`."""
        if now == before or not isinstance(given, fx.Node):
            return given if now == before else now
        read, its_now, its_before = self._read.get(given, (given, 1, 1))
        if its_now * before == now * its_before:
            return read
        common = math.gcd(now, before)
        with self.graph.inserting_before(at):
            if now == common:
                out = given
            else:
                out = self.new(operator.mul, given, now // common)
            if before == common:
                return out
            return self.new(operator.floordiv, out, before // common)

    def parts(self, given: Any, n: int, at: fx.Node) -> list[Any]:
        """The items of a tuple, which may be a node."""
        if not isinstance(given, fx.Node):
            return list(given)
        with self.graph.inserting_before(at):
            return [self.new(operator.getitem, given, i) for i in range(n)]

    def all_scaled(self, given: Any, now: Sequence[int], before: Sequence[int], at: fx.Node) -> Any:
        """Scale the items one by one; None if nothing changes."""
        if len(now) != len(before) or all(b in (-1, n) for n, b in zip(now, before)):
            return None
        given = self.parts(given, len(before), at)
        found = []
        for g, n, b in zip(given, now, before):
            found.append(g if b in (-1, n) else self.scaled(g, n, b, at))
        return found

    # -- reads -----------------------------------------------------------------------------------------
    def restore(self, node: fx.Node, old: fx.Node) -> None:
        """Give the readers of a size that shrank its old value."""
        before = self.cut.walk.values[old]
        if call_name(node) == "numel" and any(isinstance(v, torch.Size) for v in self.known(old.args)):
            # the argument is a tuple now
            node.op = "call_function"
            node.target = math.prod
        if old.target is getattr:
            asked = old.args[1]
        else:
            asked = call_name(old)
        if asked not in SIZES or operator.eq(*self.shapes(old)):
            return
        now = self.on_small(old)
        users = list(node.users)
        if isinstance(before, int):
            whole = self._restored(node, now, before)
            for user in users if whole is not node else ():
                user.replace_input_with(node, whole)
            return
        parts = self.parts(node, len(before), node.next)
        restored = tuple(map(self._restored, parts, now, before))
        for user in users:
            if user.target is operator.getitem and isinstance(user.args[1], int):
                user.replace_all_uses_with(restored[user.args[1]])
            else:
                put = lambda n: restored if n is node else n
                user.args = fx.map_arg(user.args, put)
                user.kwargs = fx.map_arg(user.kwargs, put)

    def _restored(self, node: fx.Node, now: int, before: int) -> fx.Node:
        if now == before:
            return node
        out: fx.Node = self.scaled(node, before, now, node.next)
        self._read[out] = (node, now, before)
        return out


def _sizes(sizes: _Sizes, node: fx.Node, old: fx.Node) -> None:
    """view, reshape, expand and others: sizes come as separate arguments or as one tuple."""
    given: Any
    if call_name(node) in MAKERS:
        source: tuple[Any, ...] = ()
    else:
        source = (argument(node, 0, "input"),)
    skip = len(source)
    given, before = ([*n.args[skip:]] or [n.kwargs.get("shape", n.kwargs.get("size"))] for n in (node, old))
    before = sizes.known(before)
    packed = len(before) == 1 and isinstance(before[0], (tuple, list))
    if packed:
        given = given[0]
        before = before[0]
    new = sizes.all_scaled(given, sizes.cut.shape(sizes.cut.walk.of[old]), before, node)
    if new is not None:
        node.args = (*source, *([tuple(new)] if packed else new))
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("input", "shape", "size")}


def _parts(sizes: _Sizes, node: fx.Node, old: fx.Node) -> None:
    """split and chunk: the length of each part."""
    cut = sizes.cut
    labels = sizes.first(old)
    dim = sizes.was(old, 2, "dim", 0) % labels.dim()
    if dim not in cut.axes(labels):
        return
    parts = [cut.shape(part)[dim] for part in cut.walk.of[old]]
    if call_name(old) != "split" and [part.shape[dim] for part in sizes.on_small(old)] == parts:
        return  # the call gives a number of parts, which stays right
    if node.op == "call_method":
        node.target = "split"
    else:
        node.target = torch.split
    node.args = (argument(node, 0, "input"), parts, dim)
    node.kwargs = {}


def _slices(sizes: _Sizes, node: fx.Node, old: fx.Node) -> None:
    """x[:, a:b], or a write to it, on a cut axis: a and b count the kept channels before them."""
    labels = sizes.first(old)
    index = argument(node, 1, "b")
    lost = sizes.cut.axes(labels)
    if not lost:
        return
    given, before = (list(i) if isinstance(i, tuple) else [i] for i in (index, sizes.known(old.args[1])))
    axis = 0
    for k, part in enumerate(before):
        if part is Ellipsis:
            axis = labels.dim() - sum(map(axes_of, before[k + 1 :]))
            continue
        if isinstance(part, slice) and axis in lost:
            kept = lost[axis]
            ends = (given[k].start, given[k].stop)
            given[k] = slice(
                *(_bound(sizes, kept, new, end, node) for new, end in zip(ends, (part.start, part.stop)))
            )
        axis += axes_of(part)
    node.args = (node.args[0], tuple(given) if isinstance(index, tuple) else given[0], *node.args[2:])


def _bound(sizes: _Sizes, kept: Tensor, given: Any, before: int | None, at: fx.Node) -> Any:
    if before is None:
        return None
    if before >= 0:
        return sizes.scaled(given, int(kept[:before].sum()), before, at)
    behind = int(kept[before:].sum())  # -0 would mean the beginning
    if behind:
        return sizes.scaled(given, -behind, before, at)
    return int(kept.sum())


def _narrow(sizes: _Sizes, node: fx.Node, old: fx.Node) -> None:
    labels = sizes.first(old)
    dim = sizes.was(old, 1, "dim")
    kept = sizes.cut.axes(labels).get(dim % labels.dim())
    if kept is not None:
        names = ((2, "start"), (3, "length"))
        start, length = (sizes.was(old, *name) for name in names)
        begin = start % len(kept) if start < 0 else start
        counts = (kept[:begin], start), (kept[begin : begin + length], length)
        new = []
        for name, (part, was) in zip(names, counts):
            new.append(sizes.scaled(argument(node, *name), int(part.sum()), was, node))
        node.args = (argument(node, 0, "input"), dim, *new)
        node.kwargs = {}


def _pads(sizes: _Sizes, node: fx.Node, old: fx.Node) -> None:
    """pad: how many channels are added, or, if negative, cut off."""
    before = list(sizes.was(old, 1, "pad"))
    out = sizes.cut.walk.of[old]
    inside = sizes.cut.axes(sizes.first(old))
    outside = sizes.cut.axes(out)
    now = list(before)
    for i, n in enumerate(before):
        axis = out.dim() - 1 - i // 2
        kept = (outside if n > 0 else inside).get(axis)
        if kept is not None:
            edge = kept.flip(0) if i % 2 else kept
            if n > 0:
                now[i] = int(edge[:n].sum())
            else:
                now[i] = -int(edge[:-n].sum())
    if now != before:
        given = sizes.parts(argument(node, 1, "pad"), len(before), node)
        pads = tuple(g if n == b else sizes.scaled(g, n, b, node) for g, n, b in zip(given, now, before))
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("input", "pad")}
        node.args = (argument(node, 0, "input"), pads, *node.args[2:])
        node.kwargs = kwargs


def _unflatten(sizes: _Sizes, node: fx.Node, old: fx.Node) -> None:
    before = sizes.was(old, 2, "sizes")
    dim = sizes.was(old, 1, "dim") % sizes.first(old).dim()
    now = sizes.cut.shape(sizes.cut.walk.of[old])[dim : dim + len(before)]
    new = sizes.all_scaled(argument(node, 2, "sizes"), now, before, node)
    if new is not None:
        node.args = (argument(node, 0, "input"), dim, tuple(new))
        node.kwargs = {}


def _unflatten_module(sizes: _Sizes, module: nn.Module, old: fx.Node) -> None:
    if isinstance(module, nn.Unflatten):
        out = sizes.cut.shape(sizes.cut.walk.of[old])
        before = module.unflattened_size
        start = module.dim % (len(out) - len(before) + 1)
        module.unflattened_size = tuple(-1 if b == -1 else n for b, n in zip(before, out[start:]))


def _scale(sizes: _Sizes, node: fx.Node, old: fx.Node) -> None:
    """Attention with smaller heads keeps the divisor that it had before."""
    labels = sizes.first(old)
    lost = labels.dim() - 1 in sizes.cut.axes(labels)
    if lost and node.kwargs.get("scale") is None and len(node.args) < 7:
        node.kwargs = {**node.kwargs, "scale": labels.shape[-1] ** -0.5}


REWRITES: dict[str, Callable[[_Sizes, fx.Node, fx.Node], None]] = {
    **dict.fromkeys(("view", "reshape", "expand", "broadcast_to", "new_zeros", "new_ones", *MAKERS), _sizes),
    **dict.fromkeys(("split", "chunk", "tensor_split"), _parts),
    **dict.fromkeys(("getitem", "setitem"), _slices),
    "narrow": _narrow,
    "pad": _pads,
    "unflatten": _unflatten,
    "scaled_dot_product_attention": _scale,
}
