"""Sparsers: how to choose what is pruned. Names of the original; their work comes with the pruning release."""

from __future__ import annotations

from typing import Any, TypeVar

from sparsebit.errors import NotReadyError
from sparsebit.registry import Registry

SPARSERS_MAP: Registry[type[Sparser]] = Registry("sparser")
S = TypeVar("S", bound="type[Sparser]")


class Sparser:
    """Gives a mask for one module."""

    STRATEGY = ""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotReadyError(f"{type(self).__name__}: pruning is not part of this release yet")


def register_sparser(cls: S) -> S:
    """`@register_sparser` on a class with a STRATEGY."""
    SPARSERS_MAP.add([cls.STRATEGY], cls)
    return cls


def build_sparser(config: Any, opr: Any) -> Sparser:
    return SPARSERS_MAP[config.sparser.strategy](config, opr)


SPARSERS_MAP.discover(__name__)
