"""What the nodes of a graph compute on the example, while it is being traced: shapes and dtypes, no numbers.

Nothing is run before somebody asks. What does not run without numbers is unknown.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._symbolic_trace import _orig_module_call, _orig_module_getattr
from torch.utils import _pytree as pytree

UNKNOWN = object()
Resize = Callable[[int, int], int]  # axis and size -> size
OTHER_SIZES: tuple[Callable[[int], int], ...] = (lambda n: 2 * n, lambda n: n + 1, lambda n: max(1, n // 2))


class Lengths:
    """How many items the values of nodes have, where that does not depend on the sizes of the inputs."""

    def __init__(self, root: nn.Module, inputs: Mapping[str, Any]):
        self.root, self.inputs = root, inputs
        self.shown = Shapes(root, inputs)
        self.others: list[Shapes] | None = None

    def of(self, node: fx.Node) -> int | None:
        value = self.shown.of(node)
        length = _length(value)
        if length is None or isinstance(value, torch.Size):  # the number of axes is what the example shows
            return length
        if self.others is None:
            self.others = [Shapes(self.root, self.inputs, other) for other in _other_sizes(self.inputs)]
        found = [_length(each.of(node)) for each in self.others]
        known = [n for n in found if n is not None]  # sizes that the model does not take say nothing
        return length if known and all(n == length for n in known) else None


def _length(value: Any) -> int | None:
    if isinstance(value, (tuple, list)) or (isinstance(value, Tensor) and value.dim()):
        return len(value)
    return None


def _other_sizes(inputs: Mapping[str, Any]) -> Iterator[Resize]:
    """Inputs resized: all axes of one size together; all first axes, all second ones, ... together."""
    shapes = [t.shape for t in pytree.tree_leaves(dict(inputs)) if isinstance(t, Tensor)]
    for other in OTHER_SIZES:
        for n in sorted({size for shape in shapes for size in shape}):
            yield lambda axis, size, n=n, other=other: other(size) if size == n else size
        for i in range(max(map(len, shapes), default=0)):
            yield lambda axis, size, i=i, other=other: other(size) if axis == i else size


class Shapes:
    """The values of nodes on `inputs` (by name), or on inputs that are like them but resized."""

    def __init__(self, root: nn.Module, inputs: Mapping[str, Any], resize: Resize = lambda axis, size: size):
        from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

        def empty(t: Tensor) -> Tensor:
            shape = [resize(axis, size) for axis, size in enumerate(t.shape)]
            return torch.empty(shape, dtype=t.dtype, device=t.device)

        self.root = root
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:
            self.inputs = pytree.tree_map_only(Tensor, empty, dict(inputs))
        self.values: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any:
        """The node's value, or UNKNOWN. All nodes before it run too, once: one may write to what it reads."""
        with self.mode, torch.no_grad(), _modules_as_they_are():
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
            return self._call(node, args, kwargs)
        except Exception:  # the user's code, without its numbers: whatever it says, the answer is "unknown"
            return UNKNOWN

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        found = self.root
        for name in str(node.target).split("."):
            found = getattr(found, name)
        if node.op == "get_attr":
            return found
        if not type(found).__module__.startswith("torch.nn."):
            found = copy.deepcopy(found)  # it may keep what it computes
        return found(*args, **kwargs)


@contextmanager
def _modules_as_they_are() -> Iterator[None]:
    """During a trace, calls of modules and reads of their parameters are recorded."""
    call, read = nn.Module.__call__, nn.Module.__getattr__
    nn.Module.__call__, nn.Module.__getattr__ = _orig_module_call, _orig_module_getattr  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__, nn.Module.__getattr__ = call, read  # type: ignore[method-assign]
