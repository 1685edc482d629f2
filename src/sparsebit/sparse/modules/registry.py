"""Which masked class stands for which layer, and masked classes of layers that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from sparsebit.registry import Registry
from sparsebit.sparse.modules.base import SparseOpr

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
