"""QModules: what replaces the ops of a traced graph. A weighted op is a short class, any other op is one row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from sparsebit.graph.trace import forward_owner
from sparsebit.quantization.modules.base import (
    QMODULE_MAP,
    MultipleInputsQuantOpr,
    Opr,
    QuantOpr,
    define,
    quant_mode,
    register_qmodule,
)

QMODULE_MAP.discover(__name__)

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
    "quant_mode",
    "register_qmodule",
    *sorted(_CLASSES),
]


def find_qmodule(node: fx.Node, gm: fx.GraphModule) -> type[nn.Module] | None:
    """The class that replaces `node`, or None: a module by the class whose forward it runs, a function or method
    by itself, a function of an optional package by its dotted name."""
    for key in _keys(node, gm):
        if key in QMODULE_MAP:
            return QMODULE_MAP[key]
    return None


def __getattr__(name: str) -> Any:
    """Every registered class is importable from here, whichever file it lives in."""
    if name in _CLASSES:
        return _CLASSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_known_module(cls: type) -> bool:
    return cls in QMODULE_MAP


def _keys(node: fx.Node, gm: fx.GraphModule) -> Iterator[Any]:
    if node.op == "call_module":
        cls = type(gm.get_submodule(str(node.target)))
        yield from (cls, forward_owner(cls))
    elif node.op == "call_method":
        yield getattr(torch.Tensor, str(node.target), node.target)
    elif node.op == "call_function":
        yield node.target
        yield f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__qualname__', '')}"
