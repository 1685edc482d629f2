"""Inputs that are constants in a traced graph: the graph refuses other values, which it would ignore."""

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
    """Refuse a value other than the one in the trace."""
    if torch.jit.is_scripting():
        if isinstance(value, Tensor) or str(value) != str(wanted):
            raise ValueError("forward(" + name + "=...): the model was traced with another value")
    else:
        _compare(name, value, wanted)


def _compare(name: str, value: Any, wanted: Any) -> None:
    if isinstance(value, fx.Proxy):  # the graph is traced again
        value.tracer.create_proxy("call_function", as_traced, (name, value, wanted), {})
    elif differs(value, wanted):
        raise TraceError(
            f"forward({name}=...): the model was traced with {name}={wanted!r}, so another value would be ignored"
            f"\n  fix: trace the model with example=batch, where the batch has {name!r}"
        )


def differs(value: Any, wanted: Any) -> bool:
    """Is `value` another value than the constant in the graph?"""
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
    """Inside, failed checks of decisions are collected in a list and do not raise."""
    failed: list[str] = []
    token = FAILED.set(failed)
    try:
        yield failed
    finally:
        FAILED.reset(token)


@bookkeeping
def as_decided(where: str, outcome: Any, wanted: bool) -> None:
    """Refuse an input whose sizes would lead the forward into another branch than the example did."""
    if torch.jit.is_scripting():
        if str(outcome) != str(wanted):
            raise ValueError("the example took another branch at " + where)
    else:
        _decide(where, outcome, wanted)


def _decide(where: str, outcome: Any, wanted: bool) -> None:
    if isinstance(outcome, fx.Proxy):  # the graph is traced again
        outcome.tracer.create_proxy("call_function", as_decided, (where, outcome, wanted), {})
        return
    # torch.export, where sizes are symbols, accepts only this form
    if not outcome if wanted else outcome:
        if (failed := FAILED.get()) is not None:
            failed.append(where)
            return
        raise TraceError(
            f"an input like this takes another branch of the forward than the example, and the graph does not have it: "
            f"{where}\n  fix: take an example of this size and type"
        )


@bookkeeping
def is_given(name: str, value: Any) -> None:
    """Refuse None if the example had a value."""
    if isinstance(value, fx.Proxy):
        value.tracer.create_proxy("call_function", is_given, (name, value), {})
    elif value is None:
        raise TraceError(f"forward({name}=...): is missing; the model was traced with it, and reads it")


def _is_empty(value: Any) -> bool:
    """All empty containers are equal: fx.Interpreter, which torch.export runs, has a list for `**kwargs`."""
    return isinstance(value, (list, tuple, dict)) and not value


def guard_inputs(gm: fx.GraphModule, fixed: dict[str, Any]) -> None:
    """Let the graph check its inputs `fixed` (name -> value), as far as its code can hold their values.

    An optional input that the example had becomes required: by the signature, or by a check where Python does
    not allow that, behind another optional input.
    """
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    first = inputs[-1].next if inputs else None
    for node in inputs:
        name = str(node.target).lstrip("*")
        if name not in fixed and node.args == (None,) and node.users:  # the graph cannot work with None
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
            node.type = Optional[Tensor]  # noqa: UP045  TorchScript takes inputs for tensors without it
        elif type(fixed[name]) in (bool, int, float, str):
            node.type = type(fixed[name])
    gm.recompile()


def make_unread_optional(gm: fx.GraphModule) -> None:
    """Let a call leave out inputs that the graph never reads: `gm.meta["unread_inputs"]` has their names.

    If such an input is the last one, it gets the default None.
    """
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    gm.meta["unread_inputs"] = [str(n.target) for n in inputs if not n.users]
    while inputs and not inputs[-1].users and not str(inputs[-1].target).startswith("*"):
        node = inputs.pop()
        node.args = node.args or (None,)
    gm.recompile()


def with_unread(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call with None for required inputs that it leaves out and the graph never reads."""
    signature: inspect.Signature = gm.meta["signature"]
    unread = gm.meta.get("unread_inputs", ())
    if not unread or _binds(signature, args, kwargs):
        return args, kwargs
    read = [p for p in signature.parameters.values() if p.name not in unread]
    shorter = signature.replace(parameters=read)
    if not _binds(shorter, args, kwargs):
        return args, kwargs  # Python's message about the whole signature is the clearest
    given = shorter.bind(*args, **kwargs).arguments
    missing: dict[str, None] = {}
    for p in signature.parameters.values():
        if p.name in unread and p.default is p.empty:
            missing[p.name] = None
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
    inputs = []
    for p in known.parameters.values():
        inputs.append(p.replace(default=p.empty) if p.name == name else p)
    gm.meta["signature"] = known.replace(parameters=inputs)


def _is_literal(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, enum.Enum))
