"""From an nn.Module to a GraphModule that owns a copy of everything; the user's model is never touched."""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.errors import TraceError

log = logging.getLogger("sparsebit")


class InplaceProxy(fx.Proxy):
    """Records `x += y` as what it is; torch.fx alone would record `x = x + y` and lose the write."""


def _recorded(write: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", write, (self, other), {})


for _name in ("add", "floordiv", "matmul", "mod", "mul", "pow", "sub", "truediv"):
    setattr(InplaceProxy, f"__i{_name}__", _recorded(getattr(operator, f"i{_name}")))


class LeafTracer(fx.Tracer):
    """torch.fx tracer that keeps modules whole by type (all of torch.nn) or by path (fnmatch patterns).

    A user's subclass that inherits its `forward` from a torch.nn class is a leaf too: it computes what its
    base class computes.
    """

    def __init__(
        self, skipped_module_names: Sequence[str] = (), is_known: Callable[[type], bool] = lambda t: False
    ):
        super().__init__()
        self.skipped_module_names = list(skipped_module_names)
        self.is_known = is_known
        self.stack: list[str] = []  # paths of the modules being traced, for error messages

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return InplaceProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if self._probe(module_qualified_name, self.skipped_module_names):
            return True
        return super().is_leaf_module(m, module_qualified_name) or self.is_known(forward_owner(type(m)))

    def _probe(self, module_name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(module_name, pattern) for pattern in patterns)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.stack.append(self.path_of_module(m))
        out = super().call_module(m, forward, args, kwargs)
        self.stack.pop()  # not in a finally: after an error the stack says where it happened
        return out


def forward_owner(cls: type) -> type:
    """The class whose `forward` instances of `cls` run."""
    return next(c for c in cls.__mro__ if "forward" in vars(c) or c is nn.Module)


def trace(model: nn.Module, tracer: LeafTracer) -> fx.GraphModule:
    """A GraphModule over a copy of `model`; every node carries `meta["path"]`, where it stands in the model.

    The forward is traced in eval mode (`F.dropout(..., training=self.training)` becomes a no-op); the modules
    get their train/eval flags back afterwards.
    """
    model = _own_copy(model)
    if tracer.is_leaf_module(model, "") and not isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        model = nn.Sequential(model).train(model.training)  # a single layer is a network too
    buffers = {name: (b, b._version, b.clone()) for name, b in model.named_buffers()}
    flags = {m: m.training for m in model.modules()}
    model.eval()
    try:
        graph = tracer.trace(model)
    except Exception as error:
        raise _explain(error, tracer, model) from error
    finally:
        for module, flag in flags.items():
            module.training = flag
    _restore_buffers(model, buffers)
    gm = fx.GraphModule(model, graph, type(model).__name__)
    for node in gm.graph.nodes:
        node.meta["path"] = _path_of(node)
    return gm


def _restore_buffers(model: nn.Module, before: dict[str, tuple[Tensor, int, Tensor]]) -> None:
    """A buffer that forward updates was changed by tracing; the graph has only the value it read."""
    for name, (buffer, version, value) in before.items():
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        now = owner._buffers.get(last, getattr(owner, last, None))
        if now is buffer and buffer._version == version:
            continue
        if isinstance(now, fx.Proxy):
            raise TraceError(
                f"{name}: forward stores a computed value in this buffer, which a traced graph cannot do\n"
                f"  fix: put {path or 'the part that does it'!r} into SKIP_TRACE_MODULES"
            )
        log.warning(
            "%s is updated in forward: the traced model keeps the value it has now. Put %r into SKIP_TRACE_MODULES "
            "to keep the update",
            name,
            path or type(model).__name__,
        )
        with torch.no_grad():
            buffer.copy_(value)
        owner._buffers[last] = buffer


def _own_copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}). Sparsebit works on a "
            f"copy so that your model stays as it is; detach non-leaf tensors stored in the model, or give the "
            f"classes that refuse a __deepcopy__"
        ) from error


def _explain(error: Exception, tracer: LeafTracer, model: nn.Module) -> TraceError:
    where = tracer.stack[-1] if tracer.stack else ""
    fix = (
        f"put {where!r} into SKIP_TRACE_MODULES to keep it float"
        if where
        else "move the data-dependent part of its forward into a submodule and put that into SKIP_TRACE_MODULES"
    )
    return TraceError(
        f"torch.fx cannot trace {where or type(model).__name__}: {type(error).__name__}: {error}\n  fix: {fix}"
    )


def _path_of(node: fx.Node) -> str:
    """`layer1.0.conv1` for a module, `layer1.0.add` for a function called in the forward of `layer1.0`."""
    if node.op in ("call_module", "get_attr", "placeholder", "output"):
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    inside = list(stack.values())[-1][0] if stack else ""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.name)
    return f"{inside}.{name}".lstrip(".")
