"""QModules: what replaces the ops of a traced graph. A weighted op is a short class, any other op is one row."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from sparsebit.graph.trace.tracer import forward_owner
from sparsebit.quantization.modules.base import (
    QMODULE_MAP,
    MultipleInputsQuantOpr,
    Opr,
    QuantOpr,
    define,
    quant_mode,
    register_qmodule,
)

for _room in (__name__, f"{__name__}.composite", f"{__name__}.float_ops"):
    QMODULE_MAP.discover(_room)

_CLASSES = {cls.__name__: cls for cls in QMODULE_MAP.values()}

PASSTHROUGHT_MODULES: tuple[type[nn.Module], ...] = ()  # the original's name; it was never used

__all__ = [
    "PASSTHROUGHT_MODULES",
    "QMODULE_MAP",
    "MultipleInputsQuantOpr",
    "Opr",
    "QuantOpr",
    "define",
    "find_qmodule",
    "is_known",
    "qmodule_of",
    "quant_mode",
    "register_qmodule",
    *sorted(_CLASSES),
]


def find_qmodule(node: fx.Node, gm: fx.GraphModule) -> type[nn.Module] | None:
    """The class that replaces `node`, or None: a module by the class whose forward it runs, a function or method
    by itself, what an optional package defines by its dotted name."""
    if node.op == "call_module":
        return qmodule_of(type(gm.get_submodule(str(node.target))))
    if node.op == "call_method":
        return _first(getattr(torch.Tensor, str(node.target), node.target))
    if node.op == "call_function":
        return _first(node.target, _dotted(node.target))
    return None


def qmodule_of(cls: type) -> type[nn.Module] | None:
    """The class that replaces modules of class `cls`, or None: that of any base with the same forward."""
    owner = forward_owner(cls)
    same_forward = cls.__mro__[: cls.__mro__.index(owner) + 1]
    return _first(*same_forward, _dotted(owner))


def __getattr__(name: str) -> Any:
    """Every registered class is importable from here, whichever file it lives in."""
    if name in _CLASSES:
        return _CLASSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_known(op: Any) -> bool:
    """Is there a QModule for this class or function?"""
    if isinstance(op, type) and issubclass(op, nn.Module):
        found = qmodule_of(op)
    else:
        found = _first(op, _dotted(op))
    return found is not None


def _first(*keys: Any) -> type[nn.Module] | None:
    return next((QMODULE_MAP[key] for key in keys if key in QMODULE_MAP), None)


def _dotted(op: Any) -> str:
    return f"{getattr(op, '__module__', '')}.{getattr(op, '__qualname__', '')}"
