"""Shapes and dtypes of the nodes of a graph on the example, while the graph is traced. No numbers are
computed.

Nothing runs before a value is needed. A value that needs numbers is unknown.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.graph.ops import argument, name_of
from sparsebit.graph.trace.patches import UNRECORDED, patched

UNKNOWN = object()
OTHER_SIZES: tuple[Callable[[int], int], ...] = (
    *(lambda n: 16 * n, lambda n: 2 * n, lambda n: n + 1),
    lambda n: n // 2,  # some models take no more than the example has
)
PAIRS = frozenset(("cummax", "cummin", "kthvalue", "mode", "sort", "std_mean", "topk", "var_mean"))
ALONG = frozenset(("max", "median", "min", "nanmedian"))  # pairs along an axis, otherwise a single number
Axes = frozenset[tuple[int, int]]  # which tensor of the inputs, and which of its axes


def parts_of(node: fx.Node) -> int | None:
    """The number of parts of a split or chunk, if the call fixes it; 2 for ops like `max` along an axis."""
    if node.op != "call_method" and node.target is not getattr(torch, name_of(node), None):
        return None  # another function with that name
    if name_of(node) in PAIRS or (name_of(node) in ALONG and type(argument(node, 1, "dim")) is int):
        return 2
    if len(node.args) > 1:
        said = node.args[1]
    else:
        said = next(iter(node.kwargs.values()), None)
    if name_of(node) == "chunk" and isinstance(said, int):
        return said
    if name_of(node) == "split" and isinstance(said, (list, tuple)):
        return len(said)
    return None


class Lengths:
    """The number of items of the values of nodes, if it does not depend on the sizes of the inputs."""

    def __init__(self, root: nn.Module, inputs: Mapping[str, Any]):
        self.root = root
        self.inputs = inputs
        self.shown = Shapes(root, inputs)
        shapes = [list(t.shape) for t in pytree.tree_leaves(dict(inputs)) if isinstance(t, Tensor)]
        others = []
        for axes in _together(shapes):
            others.append([_resized(shapes, axes, f) for f in OTHER_SIZES])
        self.others = [[new for new in group if new != shapes] for group in others]
        self.resized: dict[str, Shapes] = {}

    def of(self, node: fx.Node) -> int | None:
        measured = _measure(node, self.shown)
        if measured is None or isinstance(self.shown.of(node), torch.Size):  # as many axes as the example has
            return None if measured is None else measured[0]
        found = []
        for others in self.others:
            found.append(next(filter(None, (self._resized(node, s) for s in others)), None))
        known = [each for each in found if each is not None]  # sizes that the model refuses prove nothing
        if known and all(each == measured for each in known):
            return measured[0]
        return None

    def _resized(self, node: fx.Node, shapes: list[list[int]]) -> tuple[int, int] | None:
        key = str(shapes)
        if key not in self.resized:
            self.resized[key] = Shapes(self.root, self.inputs, shapes)
        return _measure(node, self.resized[key])


def _measure(node: fx.Node, shapes: Shapes) -> tuple[int, int] | None:
    """The number of items of the value; for `x.split(512, 1)` also the size before the split, which 512 may
    hide."""
    value = shapes.of(node)
    if isinstance(value, Tensor) and value.dim():
        return len(value), 0
    if not isinstance(value, (tuple, list)):
        return None
    if len(node.args) > 2:
        dim: Any = node.args[2]
    else:
        dim = node.kwargs.get("dim", 0)
    split = node.target in (torch.split, "split") and all(isinstance(v, Tensor) for v in value)
    return len(value), sum(v.shape[dim] for v in value) if split else 0


def _together(shapes: Sequence[Sequence[int]]) -> list[Axes]:
    """Axes that may only change together: axes of one size; all first axes, all second axes, ..."""
    groups: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for i, shape in enumerate(shapes):
        for axis, size in enumerate(shape):
            groups.setdefault(("size", size), set()).add((i, axis))
            groups.setdefault(("axis", axis), set()).add((i, axis))
    return list(dict.fromkeys(map(frozenset, groups.values())))


def _resized(shapes: Sequence[Sequence[int]], axes: Axes, other: Callable[[int], int]) -> list[list[int]]:
    found: list[list[int]] = []
    for i, shape in enumerate(shapes):
        found.append([max(1, other(n)) if (i, axis) in axes else n for axis, n in enumerate(shape)])
    return found


class Shapes:
    """The values of nodes on `inputs` (by name), or on inputs with other shapes."""

    def __init__(self, root: nn.Module, inputs: Mapping[str, Any], shapes: Sequence[Sequence[int]] = ()):
        from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

        others = iter(shapes)
        empty = lambda t: torch.empty(tuple(next(others, t.shape)), dtype=t.dtype, device=t.device)
        self.root = root
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:
            self.inputs = pytree.tree_map_only(Tensor, empty, dict(inputs))
        self.values: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any:
        """The node's value, or UNKNOWN. All nodes before it run once too: one may write into its input."""
        with torch.no_grad(), patched(UNRECORDED), _silence():
            for each in node.graph.nodes:
                if each not in self.values:
                    self.values[each] = self._run(each)
                if each is node:
                    break
        return self.values[node]

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.inputs.get(str(node.target).lstrip("*"), UNKNOWN)
        if any(self.values.get(source, UNKNOWN) is UNKNOWN for source in node.all_input_nodes):
            return UNKNOWN
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        try:
            function = self._function(node)
            with self.mode:
                return function(*args, **kwargs)
        except Exception:  # the user's code without numbers: any error means "unknown"
            return UNKNOWN

    def _function(self, node: fx.Node) -> Callable[..., Any]:
        if node.op == "call_method":
            return lambda first, *args, **kwargs: getattr(first, str(node.target))(*args, **kwargs)
        if node.op == "call_function":
            return node.target  # type: ignore[return-value]
        found: Any = self.root
        for name in str(node.target).split("."):
            found = getattr(found, name)
        if node.op == "get_attr":
            return lambda: found
        if type(found).__module__.startswith("torch.nn."):
            return found
        tensors = (*found.parameters(), *found.buffers())
        return copy.deepcopy(found, {id(t): t for t in tensors})  # it may store values


@contextmanager
def _silence() -> Iterator[None]:
    """torch logs each error with many lines; here errors are expected."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
