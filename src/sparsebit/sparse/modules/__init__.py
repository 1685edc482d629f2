"""Layers with masks. What a layer computes is its own class's business; here its parameters are masked on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from sparsebit.registry import Registry
from sparsebit.sparse.modules.base import SparseOpr

__all__ = [
    "SMODULE_MAP",
    "SBatchNorm2d",
    "SConv2d",
    "SLinear",
    "SparseOpr",
    "register_smodule",
    "sparse_module",
]

SMODULE_MAP: Registry[type[SparseOpr]] = Registry("sparse module")
M = TypeVar("M", bound=type[SparseOpr])


def register_smodule(sources: Iterable[Any]) -> Callable[[M], M]:
    """`@register_smodule(sources=[nn.Conv2d])`: this class replaces those modules in a SparseModel."""

    def add(cls: M) -> M:
        SMODULE_MAP.add(sources, cls)
        return cls

    return add


def sparse_module(org_module: nn.Module) -> SparseOpr:
    """The masked form of a layer: the registered one of its class, or one made for it."""
    kind = type(org_module)
    return (SMODULE_MAP.get(kind) or masked_class(kind))(org_module)


def masked_class(kind: type[nn.Module]) -> type[SparseOpr]:
    """Of a class of the user's, or a layer without a file: masks work on any module."""
    return type(f"S{kind.__name__}", (SparseOpr, kind), {"__reduce_ex__": _by_kind})


def _by_kind(self: Any, protocol: Any) -> tuple[Any, ...]:
    """pickle finds classes by their names; this one is made anew from the class it is of."""
    _, _, *state = super(type(self), self).__reduce_ex__(protocol)
    return (_without_init, (type(self).__bases__[1],), *state)


def _without_init(kind: type[nn.Module]) -> SparseOpr:
    made = masked_class(kind)
    return made.__new__(made)


SMODULE_MAP.discover(__name__)

from sparsebit.sparse.modules.layers import SConv2d, SLinear  # noqa: E402
from sparsebit.sparse.modules.norms import SBatchNorm2d  # noqa: E402
