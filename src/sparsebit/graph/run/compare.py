"""difference(): are two outputs equal, and if not, where and by how much?

Every comparison of two models or two values uses it, so one rule decides about NaN, infinities, types and sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.graph.run.calls import Call

SMALLEST = 1e-8  # a smaller difference counts as rounding, even if the values are small


class Tolerance(Enum):
    """The difference that still counts as equal, as a share of the largest finite value."""

    EXACT = 1e-5  # one op, its sums in another order
    CLOSE = 1e-4  # a float32 network after an exact rewrite
    FLOAT = 1e-3  # two traces of a float32 network, whose ops may be split differently
    HALF = 0.05  # a network in float16 or bfloat16


@dataclass(frozen=True)
class Difference:
    """The first leaf that differs."""

    where: str  # "the output", or "output 2" of several
    text: str  # what differs, for messages
    share: float = float("inf")  # of the largest finite value; infinite if the two cannot be compared

    def __str__(self) -> str:
        return f"{self.where} {self.text}"


def difference(got: Any, want: Any, tolerance: Tolerance = Tolerance.FLOAT) -> Difference | None:
    """The first difference of two values of any structure, or None if they are equal.

    Types, sizes and dtypes have to be the same. NaN equals NaN, and an infinity equals the same infinity. Whole
    numbers, truth values and texts have to be equal; floats may differ by the tolerance.
    """
    found = leaves(got)
    wanted = leaves(want)
    if len(found) != len(wanted):
        return Difference("the output", f"has {len(found)} values, not {len(wanted)}")
    for i, (x, y) in enumerate(zip(found, wanted)):
        where = "the output"
        if len(wanted) > 1:
            where = f"output {i}"
        apart = _leaf_difference(x, y, where, tolerance.value)
        if apart is not None:
            return apart
    return None


def share_apart(got: Tensor, want: Tensor) -> float:
    """The largest difference of two tensors of one size, as a share of the largest finite value of `want`.

    Infinite where only one of the two is NaN or infinite.
    """
    if not want.numel():
        return 0.0
    x = _as_real(got)
    y = _as_real(want)
    equal = (x == y) | (x.isnan() & y.isnan())
    apart = torch.where(equal, 0, x - y).abs().nan_to_num(float("inf"), float("inf"))
    worst = float(apart.max())
    if worst <= SMALLEST:
        return 0.0
    largest = float(y.abs().nan_to_num(0, 0, 0).max())
    return worst / max(largest, SMALLEST)


def difference_of_models(
    model: nn.Module,
    other: nn.Module,
    call: Call,
    tolerance: Tolerance = Tolerance.FLOAT,
    digits: bool = False,
) -> Difference | None:
    """The difference of the outputs of two models on a call. `digits`: both compute in float64, on copies."""
    if digits:
        model, other = (copy.deepcopy(m).double() for m in (model, other))
        call = in_double(call)
    with torch.no_grad():
        return difference(call.run(model), call.run(other), tolerance)


def in_double(call: Call) -> Call:
    """The call with its floats in float64, for a second look: rounding disappears, and an error stays."""
    return call.map(lambda x: x.double() if x.is_floating_point() else x)


def leaves(value: Any) -> list[Any]:
    """The leaves of a value, also inside dataclasses and mappings that torch's pytree does not look into."""
    found: list[Any] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Mapping):
            found += leaves(dict(leaf))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += leaves(vars(leaf))
        else:
            found.append(leaf)
    return found


def _leaf_difference(x: Any, y: Any, where: str, tolerance: float) -> Difference | None:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return _plain_difference(x, y, where, tolerance)
    if x.shape != y.shape:
        return Difference(where, f"has size {tuple(x.shape)}, not {tuple(y.shape)}")
    if x.dtype != y.dtype:
        return Difference(where, f"is {x.dtype}, not {y.dtype}")
    if not y.is_floating_point() and not y.is_complex():
        wrong = int((x != y).sum())
        if wrong:
            return Difference(where, f"differs in {wrong} of {y.numel()} values", wrong / y.numel())
        return None
    share = share_apart(x, y)
    if share <= tolerance:
        return None
    if share == float("inf"):
        return Difference(where, "is NaN or infinite in other places")
    return Difference(where, f"differs by {share:.2g} of the largest value", share)


def _plain_difference(x: Any, y: Any, where: str, tolerance: float) -> Difference | None:
    if type(x) is not type(y):
        return Difference(where, f"is a {type(x).__name__}, not a {type(y).__name__}")
    if isinstance(y, float):
        return _leaf_difference(torch.tensor(x), torch.tensor(y), where, tolerance)
    if isinstance(y, (bool, int, complex, str)) and x != y:
        return Difference(where, f"is {x!r}, not {y!r}")
    return None


def _as_real(x: Tensor) -> Tensor:
    if x.is_complex():
        return torch.view_as_real(x).double()
    return x.detach().double()
