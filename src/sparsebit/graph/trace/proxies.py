"""Proxies: they replace values while a model is traced."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

from torch import fx
from torch.nn.utils.rnn import PackedSequence


class InplaceProxy(fx.Proxy):
    """Records `x += y` as a write; torch.fx alone would record `x = x + y` and lose the write."""

    tracer: Any  # a LeafTracer

    def __getattr__(self, k: str) -> fx.proxy.Attribute:
        return InplaceAttribute(self, k)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __len__(self) -> int:
        length = self.tracer.length(self)
        if length is None:
            return int(super().__len__())
        return length

    def __add__(self, other: Any) -> Any:
        """`x.shape[:-1] + (4, 16)` is a tuple: some of its sizes may change, others not."""
        if isinstance(other, tuple) and self.tracer.length(self) is not None:
            return *self, *other
        return self.tracer.create_proxy("call_function", operator.add, (self, other), {})

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, tuple) and self.tracer.length(self) is not None:
            return *other, *self
        return self.tracer.create_proxy("call_function", operator.add, (other, self), {})

    def __int__(self) -> NoReturn:
        raise self.tracer.no_number()

    __float__ = __int__


class InplaceAttribute(fx.proxy.Attribute, InplaceProxy):
    """`x.shape`, or `x.view` before it is called."""


class ListProxy(InplaceProxy):
    """A list of numbers: code asks `isinstance(size, list)` before it uses one."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return list


class PackedProxy(InplaceProxy):
    """A proxy with the class PackedSequence: code asks `isinstance(x, PackedSequence)` before it uses one."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return PackedSequence


class Flag(int):
    """False, as read from `module.training`. After a test of its truth it proves nothing: of `self.training
    and self.regularized` only the first half is left."""

    asked = False

    def __bool__(self) -> bool:
        self.asked = True
        return False


def has_proxy(value: Any) -> bool:
    if isinstance(value, fx.Proxy):
        return True
    if isinstance(value, slice):
        return has_proxy((value.start, value.stop, value.step))
    inside = value.values() if isinstance(value, dict) else value
    return isinstance(value, (list, tuple, dict)) and any(map(has_proxy, inside))


def _recorded(write: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", write, (self, other), {})


for _name in ("add", "floordiv", "matmul", "mod", "mul", "pow", "sub", "truediv"):
    setattr(InplaceProxy, f"__i{_name}__", _recorded(getattr(operator, f"i{_name}")))
