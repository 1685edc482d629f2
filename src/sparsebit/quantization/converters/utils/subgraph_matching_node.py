"""Legacy: one node of a pattern in the subgraph replacement API of the original."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any


class InputMatchingType(Enum):
    """How the inputs of a MatchingNode are compared with those of a graph node."""

    ALL = 0  # the same number, in the same order
    SUBSET = 1  # each pattern input is some input of the node, in any order; the node may have more


def _always(node: Any, module: Any) -> bool:
    return True


class MatchingNode:
    """Matches a graph node by its op, its inputs and a check.

    name              unique in the pattern
    inputs            names of earlier MatchingNodes; None is any node outside of the pattern's interest
    op_type           the ops it may be: module classes (subclasses match too), functions, Tensor methods
    checker           `checker(node, module) -> bool`; module is the module, function or method of the node
    input_match_type  see InputMatchingType
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str | None],
        op_type: Sequence[Any],
        checker: Callable[[Any, Any], bool] = _always,
        input_match_type: InputMatchingType = InputMatchingType.ALL,
    ):
        self.name = name
        self.inputs = inputs
        self.op_type = op_type
        self.checker = checker
        self.input_match_type = InputMatchingType(input_match_type)

    def __repr__(self) -> str:
        ops = ", ".join(getattr(op, "__name__", str(op)) for op in self.op_type)
        return (
            f"MatchingNode({self.name}, inputs={self.inputs}, op_type=[{ops}], {self.input_match_type.name})"
        )
