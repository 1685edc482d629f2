"""Which masked class replaces which layer, and masked classes for layers without one."""

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
    """The masked class of a user's class, or of a layer without a registered one: masks work on any module."""
    return type(f"S{kind.__name__}", (SparseOpr, kind), {"__reduce_ex__": _by_kind})


def _by_kind(self: Any, protocol: Any) -> tuple[Any, ...]:
    """pickle finds classes by name; this class is made again from the class that it masks."""
    _, _, *state = super(type(self), self).__reduce_ex__(protocol)
    return (_without_init, (type(self).__bases__[1],), *state)


def _without_init(kind: type[nn.Module]) -> SparseOpr:
    made = masked_class(kind)
    return made.__new__(made)
