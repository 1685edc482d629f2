"""Sparse counterparts of modules. Names of the original; their work comes with the pruning release."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from sparsebit.errors import NotReadyError
from sparsebit.registry import Registry

SMODULE_MAP: Registry[type[nn.Module]] = Registry("sparse module")
M = TypeVar("M", bound=type[nn.Module])


def register_smodule(sources: Iterable[Any]) -> Callable[[M], M]:
    """`@register_smodule(sources=[nn.Conv2d])`: this class replaces those modules in a SparseModel."""

    def add(cls: M) -> M:
        SMODULE_MAP.add(sources, cls)
        return cls

    return add


class SparseOpr(nn.Module):
    """An operation with a mask on its weight."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotReadyError(f"{type(self).__name__}: pruning is not part of this release yet")


class SConv2d(SparseOpr):
    """Convolution with masked filters."""


class SLinear(SparseOpr):
    """Linear layer with a masked weight."""


class SBatchNorm2d(SparseOpr):
    """BatchNorm that follows the mask of its convolution."""
