"""Legacy: helpers of the subgraph replacement API: the operators of nodes, and how often to replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn


class SubgraphMatchingTimer:
    """Counts the replacements of one pattern, so that the new modules of each can get a number."""

    def __init__(self) -> None:
        self.idx = 0

    def get_idx(self) -> int:
        self.idx += 1
        return self.idx - 1


class ReplaceStrategyBase:
    """repeat: replace until the pattern is nowhere in the graph, or replace one place only."""

    def __init__(self, repeat: bool):
        self.repeat = repeat


class ReplaceStrategy:
    APPLY_REPEAT = ReplaceStrategyBase(repeat=True)
    APPLY_ONCE = ReplaceStrategyBase(repeat=False)


def recursive_getattr(op: Any, name: str, default_val: Any = None) -> Any:
    """`recursive_getattr(m, "layer1.0.conv.weight")`; the default if any part is missing."""
    for part in name.split(".") if name else ():
        if not hasattr(op, part):
            return default_val
        op = getattr(op, part)
    return op


def get_operators(
    ops: Sequence[fx.Node], m: fx.GraphModule, named_modules: Mapping[str, nn.Module] | None = None
) -> list[Any]:
    """The operator of each node: a module, a function, a Tensor method, a parameter; None for inputs, outputs."""
    return [_operator(op, m, named_modules) for op in ops]


def get_operators_type(
    ops: Sequence[fx.Node], m: fx.GraphModule, named_modules: Mapping[str, nn.Module] | None = None
) -> list[Any]:
    """The operators of nodes, with the class in place of a module or a parameter."""
    found = zip(ops, get_operators(ops, m, named_modules))
    result: list[Any] = []
    for op, what in found:
        result.append(type(what) if op.op in ("call_module", "get_attr") else what)
    return result


def _operator(op: fx.Node, m: fx.GraphModule, named_modules: Mapping[str, nn.Module] | None) -> Any:
    if op.op in ("placeholder", "output"):
        return None
    if op.op == "call_function":
        return op.target
    target = str(op.target)
    if op.op == "call_method":
        return getattr(torch.Tensor, target, None)
    if op.op == "call_module" and named_modules is not None and target in named_modules:
        return named_modules[target]  # missing: added by a pass after the dict was made, or a second name
    return recursive_getattr(m, target)
