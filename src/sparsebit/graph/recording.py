"""Calls with a proxy among their arguments that torch.fx alone would miss, recorded while a model is traced."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointFunction

from sparsebit.graph.islands import OWN

# torch.arange(x.shape[1]) and torch.finfo(x.dtype) have no tensor among their arguments
FUNCTIONS = (
    *("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"),
    *("finfo", "iinfo"),
)
# self.pe[:, :x.shape[1]]: these look at their arguments before they ask who they are; the others of Tensor ask first
METHODS = ("__getitem__", "expand", "new_empty", "new_ones", "new_zeros")


@contextmanager
def recording(tracer: fx.Tracer, namespaces: list[dict[str, Any]]) -> Iterator[None]:
    """In `namespaces`, int and float are recorded too. A part under torch.utils.checkpoint computes what it
    computes."""
    checkpoint = lambda function, preserve_rng, *args: function(*args)
    new: list[tuple[Any, str, Any]] = [(CheckpointFunction, "apply", checkpoint)]
    for name in FUNCTIONS:
        new.append(
            (torch, name, _recorded(tracer, "call_function", getattr(torch, name), getattr(torch, name)))
        )
    for name in METHODS:
        new.append((Tensor, name, _recorded(tracer, "call_method", name, getattr(Tensor, name))))
    old = [(owner, name, vars(owner).get(name)) for owner, name, _ in new]
    for owner, name, value in new:
        setattr(owner, name, value)
    for namespace in namespaces:
        namespace.update(NUMBERS)
    try:
        yield
    finally:
        for owner, name, value in old:
            delattr(owner, name) if value is None else setattr(
                owner, name, value
            )  # the inherited one shows again
        for namespace in namespaces:
            for name in NUMBERS:
                del namespace[name]


def _recorded(tracer: fx.Tracer, kind: str, target: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if has_proxy((args, kwargs)):
            return tracer.create_proxy(kind, target, args, kwargs)
        return function(*args, **kwargs)

    return call


def has_proxy(value: Any) -> bool:
    found: list[Any] = []
    fx.node.map_aggregate(value, lambda v: found.append(v) if isinstance(v, fx.Proxy) else None)
    return bool(found)


# -- int(x.shape[0] / 4) ---------------------------------------------------------------------------------
class _Number(type):
    """`int` has to return an int; but in the user's file the name can stand for another class, which records."""

    kind: type
    symbolic: Callable[[Any], Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], fx.Proxy):
            return cls.symbolic(args[0])
        return cls.kind(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.kind)


NUMBERS = {
    kind.__name__: _Number(kind.__name__, (kind,), {"kind": kind, "symbolic": staticmethod(symbolic)})
    for kind, symbolic in ((int, torch.sym_int), (float, torch.sym_float))
}


def namespace_of_caller() -> dict[str, Any] | None:
    """The globals of the user's code that is running, if its int and float are the built-in ones."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    return None if frame is None or NUMBERS.keys() & frame.f_globals.keys() else frame.f_globals
