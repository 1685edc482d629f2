"""Sparsers score channels and weights. A new file here that registers a class adds one."""

from __future__ import annotations

from typing import Any, TypeVar

from sparsebit.registry import Registry
from sparsebit.sparse.sparsers.base import Sparser

__all__ = ["SPARSERS_MAP", "Sparser", "build_sparser", "register_sparser"]

SPARSERS_MAP: Registry[type[Sparser]] = Registry("sparser")
S = TypeVar("S", bound="type[Sparser]")


def register_sparser(cls: S) -> S:
    """`@register_sparser` on a class with a STRATEGY."""
    SPARSERS_MAP.add([cls.STRATEGY], cls)
    return cls


def build_sparser(config: Any, opr: Any = None) -> Sparser:
    """The sparser that a SparseConfig, or its SPARSER section, asks for, for the layer `opr`."""
    section = getattr(config, "sparser", config)
    return SPARSERS_MAP[section.strategy](config, opr)


SPARSERS_MAP.discover(__name__)
