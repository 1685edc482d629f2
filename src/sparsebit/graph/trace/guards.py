"""Inputs that a trace made constants: another value would be ignored, so the graph itself refuses it."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Optional

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sparsebit.errors import TraceError
from sparsebit.graph.ops import bookkeeping

Call = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs of one forward


@bookkeeping
def as_traced(name: str, value: Any, wanted: Any) -> None:
    """Refuse an input that is not what the model was traced with."""
    if torch.jit.is_scripting():
        if isinstance(value, Tensor) or str(value) != str(wanted):
            raise ValueError("forward(" + name + "=...): the model was traced with another value")
    else:
        _compare(name, value, wanted)


def _compare(name: str, value: Any, wanted: Any) -> None:
    if isinstance(value, fx.Proxy):  # somebody traces the graph again
        value.tracer.create_proxy("call_function", as_traced, (name, value, wanted), {})
    elif differs(value, wanted):
        raise TraceError(
            f"forward({name}=...): the model was traced with {name}={wanted!r}, so another value would be ignored"
            f"\n  fix: trace the model with example=batch, where the batch has {name!r}"
        )


def differs(value: Any, wanted: Any) -> bool:
    """Is `value` something else than the constant that the graph has in its place?"""
    if value is wanted or (_is_empty(value) and _is_empty(wanted)):
        return False
    return type(value) is not type(wanted) or isinstance(value, Tensor) or bool(value != wanted)


@bookkeeping
def as_many(name: str, values: Any, wanted: int) -> None:
    """Refuse a list of another length than the one the model was traced with."""
    if isinstance(values, fx.Proxy):
        values.tracer.create_proxy("call_function", as_many, (name, values, wanted), {})
    elif len(values) != wanted:
        raise TraceError(
            f"forward({name}=...): has {len(values)} items, and the model was traced with {wanted}"
            f"\n  fix: trace the model with example=batch, where the batch has as many"
        )


FAILED: ContextVar[list[str] | None] = ContextVar("failed", default=None)


@contextmanager
def unchecked() -> Iterator[list[str]]:
    """Inside, checks of decisions do not refuse: the list has those that would."""
    failed: list[str] = []
    token = FAILED.set(failed)
    try:
        yield failed
    finally:
        FAILED.reset(token)


@bookkeeping
def as_decided(where: str, outcome: Any, wanted: bool) -> None:
    """Refuse an input whose sizes would take the forward another way than those of the example did."""
    if torch.jit.is_scripting():
        if str(outcome) != str(wanted):
            raise ValueError("the example took another way at " + where)
    else:
        _decide(where, outcome, wanted)


def _decide(where: str, outcome: Any, wanted: bool) -> None:
    if isinstance(outcome, fx.Proxy):  # somebody traces the graph again
        outcome.tracer.create_proxy("call_function", as_decided, (where, outcome, wanted), {})
        return
    # torch.export, where sizes are symbols, takes this form only
    if not outcome if wanted else outcome:
        if (failed := FAILED.get()) is not None:
            failed.append(where)
            return
        raise TraceError(
            f"an input like this takes the forward another way than the example did, which the graph does not have: "
            f"{where}\n  fix: take an example of this size and type"
        )


@bookkeeping
def is_given(name: str, value: Any) -> None:
    """Refuse None where the model was traced with something."""
    if isinstance(value, fx.Proxy):
        value.tracer.create_proxy("call_function", is_given, (name, value), {})
    elif value is None:
        raise TraceError(f"forward({name}=...): is missing; the model was traced with it, and reads it")


def _is_empty(value: Any) -> bool:
    """Of no kind: fx.Interpreter, which torch.export runs, has a list for `**kwargs`."""
    return isinstance(value, (list, tuple, dict)) and not value


def guard_inputs(gm: fx.GraphModule, fixed: dict[str, Any]) -> None:
    """Let the graph check its inputs `fixed` (name -> value), as far as its code can hold their values.

    An optional input that the trace had is required: by the signature, or where Python has no way, behind another
    optional one, by a check.
    """
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    first = inputs[-1].next if inputs else None
    for node in inputs:
        name = str(node.target).lstrip("*")
        if name not in fixed and node.args == (None,) and node.users:  # None is what the graph cannot take
            if node.prev.op == "placeholder" and node.prev.args:
                with gm.graph.inserting_before(first):
                    gm.graph.call_function(is_given, (name, node))
            else:
                _require(gm, node, name)
        if name not in fixed or not all(map(_is_literal, pytree.tree_leaves(fixed[name]))):
            continue
        with gm.graph.inserting_before(first):
            gm.graph.call_function(as_traced, (name, node, fixed[name]))
        if fixed[name] is None:
            node.type = Optional[Tensor]  # noqa: UP045  TorchScript takes inputs for tensors unless told
        elif type(fixed[name]) in (bool, int, float, str):
            node.type = type(fixed[name])
    gm.recompile()


def make_unread_optional(gm: fx.GraphModule) -> None:
    """A call may leave out the inputs that the graph never reads: `gm.meta["unread_inputs"]` has their names.

    Where such an input is the last one, it gets the default None.
    """
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    gm.meta["unread_inputs"] = [str(n.target) for n in inputs if not n.users]
    while inputs and not inputs[-1].users and not str(inputs[-1].target).startswith("*"):
        node = inputs.pop()
        node.args = node.args or (None,)
    gm.recompile()


def with_unread(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call with None for required inputs that it leaves out and that the graph never reads."""
    signature: inspect.Signature = gm.meta["signature"]
    unread = gm.meta.get("unread_inputs", ())
    if not unread or _binds(signature, args, kwargs):
        return args, kwargs
    read = [p for p in signature.parameters.values() if p.name not in unread]
    shorter = signature.replace(parameters=read)
    if not _binds(shorter, args, kwargs):
        return args, kwargs  # Python's own message about the whole signature says it best
    given = shorter.bind(*args, **kwargs).arguments
    missing = {
        p.name: None for p in signature.parameters.values() if p.name in unread and p.default is p.empty
    }
    full = inspect.BoundArguments(signature, {**missing, **given})
    return full.args, full.kwargs


def _binds(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _require(gm: fx.GraphModule, node: fx.Node, name: str) -> None:
    node.args = ()
    known: inspect.Signature = gm.meta["signature"]
    inputs = [p.replace(default=p.empty) if p.name == name else p for p in known.parameters.values()]
    gm.meta["signature"] = known.replace(parameters=inputs)


def _is_literal(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, enum.Enum))
