"""Inputs that a trace made constants: another value would be ignored, so the graph itself refuses it."""

from __future__ import annotations

import enum
from typing import Any, Optional

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sparsebit.errors import TraceError


@fx.node.has_side_effect
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
    elif (
        value is not wanted
        and not (_is_empty(value) and _is_empty(wanted))
        and (type(value) is not type(wanted) or isinstance(value, Tensor) or value != wanted)
    ):
        raise TraceError(
            f"forward({name}=...): the model was traced with {name}={wanted!r}, so another value would be ignored"
            f"\n  fix: trace the model with example=batch, where the batch has {name!r}"
        )


def _is_empty(value: Any) -> bool:
    """Of no kind: fx.Interpreter, which torch.export runs, has a list for `**kwargs`."""
    return isinstance(value, (list, tuple, dict)) and not value


def guard_inputs(gm: fx.GraphModule, fixed: dict[str, Any]) -> None:
    """Let the graph check its inputs `fixed` (name -> value), as far as its code can hold their values."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    first = inputs[-1].next if inputs else None
    for node in inputs:
        name = str(node.target).lstrip("*")
        if name not in fixed or not all(map(_is_literal, pytree.tree_leaves(fixed[name]))):
            continue
        with gm.graph.inserting_before(first):
            gm.graph.call_function(as_traced, (name, node, fixed[name]))
        if fixed[name] is None:
            node.type = Optional[Tensor]  # noqa: UP045  TorchScript takes inputs for tensors unless told
        elif type(fixed[name]) in (bool, int, float, str):
            node.type = type(fixed[name])
    gm.recompile()


def _is_literal(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, enum.Enum))
