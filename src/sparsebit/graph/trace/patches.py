"""All that a trace changes in Python and torch, in one table.

torch.fx records a call when one of its arguments is a proxy and the function asks that argument. Some functions look at
their arguments first, or have no tensor among them. While a model is traced, the rows of PATCHES replace these.
A replacement acts only in the thread that traces; other threads call the original. One lock lets one trace run at a
time. A new row needs a reason and a test that fails without it. Prefer a TorchFunctionMode (such as Indexing) or the
torch.export front-end to a new row (docs/decisions.md).
"""

from __future__ import annotations

import builtins
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._symbolic_trace import _orig_module_call, _orig_module_getattr
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from sparsebit.graph.trace.branches import users_frame
from sparsebit.graph.trace.imports import untouched_imports
from sparsebit.graph.trace.packed import FUNCTIONS as PACKING
from sparsebit.graph.trace.packed import open_to_pytree, recorded
from sparsebit.graph.trace.proxies import Flag, has_proxy

LOCK = threading.RLock()  # torch is one for all threads
Make = Callable[[Any, Any], Any]  # (tracer, original) -> replacement


@dataclass(frozen=True)
class Patch:
    """One replaced attribute."""

    owner: Any
    name: str
    make: Make
    why: str
    test: str  # the test in tests/graph that fails without this row


# -- the replacements ------------------------------------------------------------------------------------
def _function(tracer: Any, original: Any) -> Any:
    """Record a call of a function with a proxy anywhere among its arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if has_proxy((args, kwargs)):
            return tracer.create_proxy("call_function", original, args, kwargs)
        return original(*args, **kwargs)

    return call


def _method(tracer: Any, original: Any) -> Any:
    """Record a call of a method with a proxy anywhere among its arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if has_proxy((args, kwargs)):
            return tracer.create_proxy("call_method", original.__name__, args, kwargs)
        return original(*args, **kwargs)

    return call


def _without_checkpoint(tracer: Any, original: Any) -> Any:
    return lambda function, preserve_rng, *args: function(*args)


def _noting_length(tracer: Any, original: Any) -> Any:
    """`len` that marks the lists among the inputs whose length the forward reads."""

    def count(value: Any) -> int:
        for items in tracer.lists:
            if items.value is value:
                items.counted = True
        return int(original(value))

    return count


def _new_packed(tracer: Any, original: Any) -> Any:
    return lambda cls, *args, **kwargs: recorded(
        tracer, cls, functools.partial(original, cls), *args, **kwargs
    )


def _recording_code(function: Any) -> tuple[Patch, Patch]:
    """Replace the code of a function: user's modules may hold the function under another name.

    The defaults come first, because another thread may call the function between the two.
    """

    def defaults(tracer: Any, original: Any) -> Any:
        before = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__
        )
        before.__kwdefaults__ = original
        return {"_call": functools.partial(recorded, tracer, function, before)}

    why = "it reads the lengths of sequences before it asks a proxy"
    test = "test_single_calls_with_and_without_an_example"
    return (
        Patch(function, "__kwdefaults__", defaults, why, test),
        Patch(function, "__code__", lambda tracer, original: _instead.__code__, why, test),
    )


def _instead(*args: Any, _call: Callable[..., Any], **kwargs: Any) -> Any:
    return _call(*args, **kwargs)


def _flag(tracer: Any, original: Any) -> property:
    """`module.training` as a property that returns a Flag in place of False."""
    thread = threading.get_ident()

    def read(module: nn.Module) -> Any:
        training = vars(module).get("training")
        if training or thread != threading.get_ident():
            return training
        return Flag()

    def write(module: nn.Module, value: Any) -> None:
        vars(module)["training"] = value

    return property(read, write)


def _taking_flags(tracer: Any, original: Any) -> Any:
    def call(x: Any, p: Any, train: Any) -> Any:
        if isinstance(train, Flag):
            train = False
        return original(x, p, train)

    return call


# -- the table -------------------------------------------------------------------------------------------
NO_TENSOR = "it has no tensor among its arguments: torch.arange(x.shape[1]), torch.finfo(x.dtype)"
LOOKS_FIRST = "it reads its arguments before it asks a proxy"
MAKERS = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros")
PATCHES: tuple[Patch, ...] = (
    *(Patch(torch, name, _function, NO_TENSOR, "test_is_traced_without_islands") for name in MAKERS),
    Patch(torch, "finfo", _function, NO_TENSOR, "test_what_is_imported_meanwhile_sees_torch_as_it_is"),
    Patch(torch, "iinfo", _function, NO_TENSOR, "test_every_function_of_the_table_is_recorded"),
    *(
        Patch(torch, name, _function, "it refuses a Flag", "test_dropout_of_self_training_is_switched")
        for name in ("alpha_dropout", "dropout", "feature_alpha_dropout")
    ),
    *(
        Patch(Tensor, name, _method, LOOKS_FIRST, "test_every_function_of_the_table_is_recorded")
        for name in ("expand", "new_empty", "new_ones", "new_zeros")
    ),
    Patch(
        CheckpointFunction,
        "apply",
        _without_checkpoint,
        "an autograd function hides its calls; the part computes the same without it",
        "test_checkpointed_part_has_gradients",
    ),
    Patch(
        builtins,
        "len",
        _noting_length,
        "the length of a list of inputs becomes a constant of the graph, which needs a check",
        "test_the_length_of_a_list_is_no_constant",
    ),
    *(patch for function in PACKING for patch in _recording_code(function)),
    Patch(
        PackedSequence,
        "__new__",
        _new_packed,
        "it reads the lengths of sequences before it asks a proxy",
        "test_a_new_packed_sequence_is_a_call",
    ),
)
# During the trace that finds out where a False comes from (dropout.py).
FLAGS: tuple[Patch, ...] = (
    Patch(
        nn.Module,
        "training",
        _flag,
        "a False has no origin; a Flag does",
        "test_dropout_of_self_training_is_switched",
    ),
    *(
        Patch(torch._VF, name, _taking_flags, "it needs a bool", "test_dropout_of_self_training_is_switched")
        for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    ),
)
# While values of nodes are computed in the middle of a trace (shapes.py): torch.fx replaces these two itself.
UNRECORDED: tuple[Patch, ...] = (
    Patch(
        nn.Module,
        "__call__",
        lambda tracer, original: _orig_module_call,
        "torch.fx records calls of modules",
        "test_pairs_are_unpacked_without_an_example",
    ),
    Patch(
        nn.Module,
        "__getattr__",
        lambda tracer, original: _orig_module_getattr,
        "torch.fx records reads of parameters",
        "test_pairs_are_unpacked_without_an_example",
    ),
)


# -- applying it -----------------------------------------------------------------------------------------
class _Applied:
    """Rows with their replacements; redo() and undo() switch them."""

    def __init__(self, tracer: Any, rows: Sequence[Patch]):
        self.rows = rows
        self.new: list[Any] = []
        self.old: list[Any] = []
        for row in rows:
            original = getattr(row.owner, row.name, None)
            made = row.make(tracer, original)
            self.new.append(_only_in_this_thread(made, original) if callable(made) else made)
            self.old.append(_stored(row))

    def redo(self) -> None:
        for row, value in zip(self.rows, self.new):
            setattr(row.owner, row.name, value)

    def undo(self) -> None:
        for row, value in zip(reversed(self.rows), reversed(self.old)):
            if value is None:
                delattr(row.owner, row.name)  # the inherited one shows again
            else:
                setattr(row.owner, row.name, value)


def _stored(row: Patch) -> Any:
    """The attribute of the owner itself, and not of a base of it."""
    if isinstance(row.owner, FunctionType):
        return getattr(row.owner, row.name)
    return vars(row.owner).get(row.name)


def _only_in_this_thread(replacement: Callable[..., Any], original: Any) -> Callable[..., Any]:
    thread = threading.get_ident()

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            return replacement(*args, **kwargs)
        return original(*args, **kwargs)

    return call


@contextmanager
def patched(rows: Sequence[Patch], tracer: Any = None) -> Iterator[_Applied]:
    """Inside, the rows are in place."""
    with LOCK:
        applied = _Applied(tracer, rows)
        applied.redo()
        try:
            yield applied
        finally:
            applied.undo()


@contextmanager
def recording(tracer: fx.Tracer, namespaces: list[dict[str, Any]]) -> Iterator[None]:
    """Inside, `tracer` records the functions of PATCHES, and `int` and `float` in the given namespaces."""
    open_to_pytree()
    with patched(PATCHES, tracer) as applied:
        for namespace in namespaces:
            namespace.update(NUMBERS)
        try:
            with untouched_imports(applied.undo, applied.redo), Indexing(tracer):
                yield
        finally:
            for namespace in namespaces:
                for name in NUMBERS:
                    del namespace[name]


class Indexing(TorchFunctionMode):
    """`self.pe[:, :x.shape[1]]`: a tensor is indexed with a proxy.

    Tensor.__getitem__ must not be replaced, not even for a moment. A class that once had one in Python counts as a
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


# -- int(x.shape[0] / 4) ---------------------------------------------------------------------------------
class _Number(type):
    """`int` has to return an int. But in the user's file the name can mean another class, which records."""

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


__all__ = ["FLAGS", "PATCHES", "UNRECORDED", "Patch", "namespace_of_caller", "patched", "recording"]
