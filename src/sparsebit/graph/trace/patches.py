"""Calls with a proxy among their arguments that torch.fx alone would miss, recorded while a model is traced."""

from __future__ import annotations

import builtins
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from sparsebit.graph.trace.branches import users_frame
from sparsebit.graph.trace.imports import untouched_imports
from sparsebit.graph.trace.packed import packing
from sparsebit.graph.trace.proxies import has_proxy

# torch.arange(x.shape[1]) and torch.finfo(x.dtype) have no tensor among their arguments
FUNCTIONS = (
    *("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"),
    *("finfo", "iinfo"),
    # these look at their arguments first, and take no Flag (dropouts.py)
    *("alpha_dropout", "dropout", "feature_alpha_dropout"),
)
# these look at their arguments before they ask who they are; the others of Tensor ask first
METHODS = ("expand", "new_empty", "new_ones", "new_zeros")
ONE = threading.RLock()  # torch is one for all threads


@contextmanager
def recording(tracer: fx.Tracer, namespaces: list[dict[str, Any]]) -> Iterator[None]:
    """In `namespaces`, int and float are recorded too. A part under torch.utils.checkpoint computes what it
    computes."""
    with ONE, _prepared(tracer, namespaces):
        yield


@contextmanager
def _prepared(tracer: fx.Tracer, namespaces: list[dict[str, Any]]) -> Iterator[None]:
    checkpoint = lambda function, preserve_rng, *args: function(*args)
    new: list[tuple[Any, str, Any]] = [
        (CheckpointFunction, "apply", checkpoint),
        (builtins, "len", _counting(tracer)),
    ]
    for name in FUNCTIONS:
        new.append(
            (torch, name, _recorded(tracer, "call_function", getattr(torch, name), getattr(torch, name)))
        )
    for name in METHODS:
        new.append((Tensor, name, _recorded(tracer, "call_method", name, getattr(Tensor, name))))
    old = [(owner, name, vars(owner).get(name)) for owner, name, _ in new]
    redo = functools.partial(_set, new)
    undo = functools.partial(_set, old)
    redo()
    for namespace in namespaces:
        namespace.update(NUMBERS)
    try:
        with packing(tracer), untouched_imports(undo, redo), _Indexing(tracer):
            yield
    finally:
        undo()
        for namespace in namespaces:
            for name in NUMBERS:
                del namespace[name]


class _Indexing(TorchFunctionMode):
    """`self.pe[:, :x.shape[1]]`: a tensor is indexed with a proxy.

    Tensor.__getitem__ must not be replaced, not even for a moment: a class that once had one in Python counts as a
    sequence from then on, and `torch.tensor([torch.tensor(1)])` asks its items for their length.
    """

    def __init__(self, tracer: fx.Tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__ and isinstance(args[0], Tensor) and has_proxy((args, kwargs)):
            return self.tracer.create_proxy("call_method", "__getitem__", args, kwargs)
        return func(*args, **kwargs)


def _set(values: list[tuple[Any, str, Any]]) -> None:
    for owner, name, value in values:
        if value is None:
            delattr(owner, name)  # the inherited one shows again
        else:
            setattr(owner, name, value)


def _counting(tracer: Any) -> Callable[[Any], int]:
    """`len`, which notes the lists among the inputs whose length somebody wants to know."""

    def count(value: Any, of: Callable[[Any], int] = len) -> int:
        for items in tracer.lists:
            if items.value is value:
                items.counted = True
        return of(value)

    return count


def _recorded(tracer: fx.Tracer, kind: str, target: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if has_proxy((args, kwargs)):
            return tracer.create_proxy(kind, target, args, kwargs)
        return function(*args, **kwargs)

    return call


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
    frame = users_frame()
    if frame is None or NUMBERS.keys() & frame.f_globals.keys():
        return None
    return frame.f_globals
