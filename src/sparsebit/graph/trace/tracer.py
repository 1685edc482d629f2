"""LeafTracer: a tracer of torch.fx for ordinary models.

torch.nn layers stay whole. A module that cannot be traced becomes a leaf at once (an island). Inputs are
taken apart as in the example, and `no_grad` blocks are recorded.
"""

from __future__ import annotations

import inspect
import operator
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence

from sparsebit.errors import TraceError
from sparsebit.graph.islands import Island, island
from sparsebit.graph.ops import argument, name_of, writes_input
from sparsebit.graph.run.calls import Call
from sparsebit.graph.trace.branches import line_of_caller, of_the_moment, only_outcome
from sparsebit.graph.trace.decorated import called_as_shown
from sparsebit.graph.trace.guards import as_decided
from sparsebit.graph.trace.packed import Items, fields_of, is_packed
from sparsebit.graph.trace.patches import namespace_of_caller, recording
from sparsebit.graph.trace.proxies import InplaceProxy, ListProxy, PackedProxy, has_proxy
from sparsebit.graph.trace.shapes import Lengths, parts_of

VIEWS = frozenset(  # calls whose result may be the memory of their first argument
    (
        *("chunk", "contiguous", "detach", "expand", "expand_as", "flatten", "float", "getattr", "getitem"),
        *("narrow", "permute", "reshape", "select", "split", "squeeze", "t", "to", "transpose", "type_as"),
        *("unbind", "unflatten", "unsqueeze", "view", "view_as"),
    )
)


class LeafTracer(fx.Tracer):
    """Leaves are torch.nn layers, modules and functions that `is_known` accepts, paths that match
    `skipped_module_names` (fnmatch patterns), and `islands`: modules that could not be traced.

    A user's subclass that inherits its `forward` from a torch.nn class is a leaf too: it computes the same as
    its base.

    decides  an `if` on sizes takes the branch of the example, and the graph refuses inputs of other branches.
    """

    def __init__(
        self,
        skipped_module_names: Sequence[str] = (),
        is_known: Callable[[Any], bool] = lambda op: False,
        decides: bool = False,
    ):
        super().__init__(param_shapes_constant=True)
        self.decides = decides
        self.skipped_module_names = list(skipped_module_names)
        self.is_known = is_known
        self.islands: dict[str, Island] = {}
        self.inputs: Mapping[str, Any] = {}  # the value of an input in the example, or its default
        self.example: Mapping[str, Any] = {}  # all inputs of the example by name, if there is one
        self.shown: Call | None = None  # the example as a call
        self.as_shown = False  # call a decorated forward like the example
        self.lengths: Lengths | None = None
        self.lists: list[Items] = []  # inputs that are lists or tuples
        self.thread = threading.get_ident()
        self.lists_left: set[str] = set()  # inputs that are lists of numbers, and stay inputs
        self.namespaces: list[dict[str, Any]] = []  # globals of code that calls int or float on sizes

    def proxy(self, node: fx.Node) -> fx.Proxy:
        if is_packed(node, self.root):
            node.meta["packed"] = True
        return (PackedProxy if node.meta.get("packed") else InplaceProxy)(node, self)

    # -- modules -------------------------------------------------------------------------------------
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.islands or getattr(m, "is_leaf", False) is True:
            return True
        if self._probe(module_qualified_name, self.skipped_module_names) or self.is_known(type(m)):
            return True
        # nn.TransformerEncoder and the like are made of layers: look inside
        made_of_layers = any(True for _ in m.children())
        return super().is_leaf_module(m, module_qualified_name) and not made_of_layers

    def _probe(self, module_name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(module_name, pattern) for pattern in patterns)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.thread != threading.get_ident():
            return forward(*args, **kwargs)  # torch.fx records the calls of all threads
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        mark = self._last_node()
        stack = self.module_stack.copy()
        state = State(m)
        try:
            out = super().call_module(m, forward, args, kwargs)
            state.settle()
            return out
        except Exception as error:  # the user's forward runs on proxies; the module becomes an island
            self._erase_after(mark)
            self.module_stack = stack
            self.islands[path] = island(path, error)
        return self.create_proxy("call_module", path, args, kwargs)

    def _last_node(self) -> fx.Node | None:
        return next(iter(reversed(self.graph.nodes)), None)

    def _erase_after(self, mark: fx.Node | None) -> None:
        while (node := self._last_node()) is not mark and node is not None:
            self.graph.erase_node(node)

    # -- functions -----------------------------------------------------------------------------------
    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
        if kind == "call_method" and str(target).startswith("__"):
            kind, target, args = _as_operator(str(target), args)
        if kind == "call_function" and self._is_users(target):
            inside = self._look_inside(target, args, kwargs)
            if inside is not None:
                return inside
        proxy = super().create_proxy(kind, target, args, kwargs, *more, **named)
        if not torch.is_grad_enabled():
            proxy.node.meta["no_grad"] = True
        if writes_input(proxy.node, self.root):
            self._refuse_if_kept(_written(proxy.node))
        return proxy

    def _refuse_if_kept(self, name: str | None) -> None:
        """Refuse a write into a constant of the graph, which every forward would repeat.

        A buffer is handled by State. Parameters have a name in the graph, so a write to one is a step of the
        graph.
        """
        if name is not None and name not in dict(self.root.named_parameters(remove_duplicate=False)):
            raise TraceError(f"forward writes to {name}, which the next forward would read")

    def _is_users(self, target: Any) -> bool:
        """Is it a function marked with torch.fx.wrap? Often it is marked only because of an `if`, and
        contains layers."""
        package = str(getattr(target, "__module__", "")).partition(".")[0]
        own = package in ("torch", "sparsebit")
        return isinstance(target, types.FunctionType) and not own and not self.is_known(target)

    def _look_inside(self, target: Callable[..., Any], args: Any, kwargs: Any) -> fx.Proxy | None:
        mark = self._last_node()
        try:
            out = target(*args, **kwargs)
        except Exception:  # the user's function may refuse proxies; it is recorded as one call
            out = None
        if isinstance(out, fx.Proxy):
            return out
        self._erase_after(mark)
        return None

    def to_bool(self, obj: fx.Proxy) -> bool:
        """`assert` and `if ...: raise` have one outcome that continues; other branches need `decides`."""
        outcome = only_outcome()
        if outcome is None and self.decides and self.example:
            outcome = self._decided(obj)
        if outcome is None:
            return super().to_bool(obj)
        return outcome

    def _decided(self, obj: fx.Proxy) -> bool | None:
        if of_the_moment(obj.node):
            found = None
        else:
            found = self._on_example().shown.of(obj.node)
        if type(found) not in (bool, int):
            return None  # it depends on values
        if type(found) is int:
            obj = self.create_proxy("call_function", operator.ne, (obj, 0), {})
        self.create_proxy("call_function", as_decided, (line_of_caller(), obj, bool(found)), {})
        return bool(found)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """`list(x.chunk(2, 1))`, `(*x.shape[:-1], 4)`"""
        length = self.length(obj)
        if length is None:
            return super().iter(obj)
        return iter(
            [self.create_proxy("call_function", operator.getitem, (obj, i), {}) for i in range(length)]
        )

    def length(self, obj: fx.Proxy) -> int | None:
        """The number of items: fixed by the call, or known from the example if sizes do not change it."""
        parts = parts_of(obj.node) or fields_of(obj.node, self.root)
        if parts is None and self.example:
            return self._on_example().of(obj.node)
        return parts

    def _on_example(self) -> Lengths:
        known = {k: v for k, v in self.example.items() if k in self.inputs or type(v) is not list}
        self.lengths = self.lengths or Lengths(self.root, known)
        return self.lengths

    def prepared_torch(self) -> AbstractContextManager[None]:
        return recording(self, self.namespaces)

    def no_number(self) -> TraceError:
        """`int(x.shape[0] / 4)` cannot return a proxy. The next trace knows the code and records the call."""
        namespace = namespace_of_caller()
        if namespace is not None and not any(known is namespace for known in self.namespaces):
            self.namespaces.append(namespace)
        return TraceError("int() and float() of a value that depends on the input")

    # -- inputs and outputs --------------------------------------------------------------------------
    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        # those of another graph
        self.lengths = None
        self.lists = []
        self.thread = threading.get_ident()
        bare = inspect.unwrap(root_fn)  # a decorator has other inputs than the function inside
        plain, args = super().create_args_for_root(bare, is_module)
        if self.as_shown:
            root_fn = called_as_shown(root_fn, args[1:], self.shown)
        elif bare is root_fn:
            root_fn = plain
        for i, proxy in enumerate(args):
            name = ""
            if isinstance(proxy, fx.Proxy):
                name = str(proxy.node.target).lstrip("*")
            if name in self.inputs:
                args[i] = like(self.inputs[name], proxy)
            elif name in self.lists_left:
                args[i] = ListProxy(proxy.node, self)
        return root_fn, args

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node  # also a proxy whose class is a tuple
        if isinstance(a, dict) and type(a) is not dict:  # an OrderedDict, a ModelOutput: keep the type
            if is_dataclass(a):
                values = {f.name: getattr(a, f.name) for f in fields(a)}
                return self.create_node(
                    "call_function", type(a), (), {k: self.create_arg(v) for k, v in values.items()}
                )
            return self.create_node("call_function", type(a), (super().create_arg(dict(a)),), {})
        try:
            return super().create_arg(a)
        except NotImplementedError:
            kind = type(a).__name__
            fix = ""
            if kind.endswith("Cache"):
                fix = "; with use_cache=False in the example there is none"
            raise TraceError(f"a graph cannot hold a {kind}{fix}") from None


def _as_operator(method: str, args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """`buffer[x]` reaches the tracer as a call of Tensor.__getitem__, `x[i]` as operator.getitem: make them
    equal."""
    name = method.strip("_")
    named = lambda n: getattr(operator, n, None) or getattr(operator, f"{n}_", None)
    if named(name):
        return "call_function", named(name), args
    if name.startswith("r") and named(name[1:]) and len(args) == 2:
        return "call_function", named(name[1:]), args[::-1]
    return "call_method", method, args


def like(example: Any, proxy: Any) -> Any:
    """`example` with each tensor replaced by a proxy of it; other values do not change."""
    if isinstance(example, Tensor):
        return proxy
    if isinstance(example, PackedSequence):
        proxy.node.meta["packed"] = True
        return proxy.tracer.proxy(proxy.node)
    if is_dataclass(example) and not isinstance(example, (type, dict)):
        values = {f.name: like(getattr(example, f.name), getattr(proxy, f.name)) for f in fields(example)}
        return type(example)(**values)
    if isinstance(example, Mapping):
        return _same_type(example, {k: like(v, proxy[k]) for k, v in example.items()})
    if isinstance(example, tuple) and hasattr(example, "_fields"):
        return type(example)(*(like(v, proxy[i]) for i, v in enumerate(example)))
    if isinstance(example, (list, tuple)):
        items = [like(v, proxy[i]) for i, v in enumerate(example)]
        nodes = []
        for item in items:
            nodes.append(item.node if isinstance(item, fx.Proxy) else None)
        value = type(example)(items)
        proxy.tracer.lists.append(Items(proxy.node, value, nodes))
        return value
    return example


def _same_type(example: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(example) is dict:
        return values
    return type(example)(values)  # type: ignore[call-arg]


class State:
    """The attributes of a module before its forward is traced."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.attributes = dict(vars(module))
        self.buffers = {name: (b, b._version) for name, b in module._buffers.items() if b is not None}

    def settle(self) -> None:
        """Undo the attributes that the forward set; refuse a changed buffer, which the next forward would
        read."""
        for name, (buffer, version) in self.buffers.items():
            if self.module._buffers.get(name) is not buffer or buffer._version != version:
                raise TraceError(f"forward updates its buffer {name!r}")
        for name, value in list(vars(self.module).items()):
            if name not in ("_modules", "_parameters", "_buffers") and has_proxy(value):
                self._put_back(name)

    def _put_back(self, name: str) -> None:
        """`self.attention_map = x` is stored for a later look; a graph has no place for it."""
        if name in self.attributes:
            self.module.__dict__[name] = self.attributes[name]
        else:
            del self.module.__dict__[name]


def forward_owner(cls: type) -> type:
    """The class whose `forward` instances of `cls` run."""
    return next(c for c in cls.__mro__ if "forward" in vars(c) or c is nn.Module)


def _written(node: fx.Node) -> str | None:
    """The tensor of the model, or the constant, that an in-place call changes; None if it changes another
    value."""
    found: Any = node.kwargs.get("out") or argument(node, 0, "input")
    while isinstance(found, fx.Node) and found.args and name_of(found) in VIEWS:
        found = found.args[0]
    if isinstance(found, fx.Node) and found.op == "get_attr":
        return str(found.target)
    return None
