"""difference(): one rule for NaN, infinities, types and sizes, with the tolerance as a share of the largest value."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn, tensor

from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.compare import Tolerance, difference, difference_of_models, share_apart

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    "value",
    [
        tensor([NAN, INF, -INF, 1.0]),
        tensor([]),
        tensor(2.0),
        tensor([True, False]),
        tensor([1 + 2j, NAN]),
        {"a": (tensor([1.0]), None, "text", 3, 2.5, NAN)},
        [],
    ],
)
def test_a_value_equals_its_copy(value):
    assert difference(value, value) is None


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (tensor([INF, 1.0, 2.0]), tensor([INF, 5.0, -7.0])),  # an infinity allows nothing beside it
        (tensor([NAN, 1.0]), tensor([NAN, 5.0])),
        (tensor([NAN, 1.0]), tensor([1.0, 1.0])),
        (tensor([1.0, 1.0]), tensor([NAN, 1.0])),
        (tensor([INF, 1.0]), tensor([-INF, 1.0])),
        (tensor([INF]), tensor([3.0])),
        (tensor([3.0]), tensor([INF])),
        (tensor([1, 2]), tensor([1, 3])),
        (tensor([100000]), tensor([100001])),  # whole numbers are equal or not
        (tensor([1.0]), tensor([1.0], dtype=torch.float64)),
        (tensor([1.0]), tensor([[1.0]])),
        (tensor([1.0]), 1.0),
        (1, True),
        (2.0, 3.0),
        ("a", "b"),
        (tensor([1.0]), (tensor([1.0]), tensor([1.0]))),
        (tensor([1j]), tensor([2j])),
    ],
)
@pytest.mark.parametrize("tolerance", Tolerance)
def test_what_differs_whatever_the_tolerance(got, want, tolerance):
    assert difference(got, want, tolerance) is not None


@pytest.mark.parametrize("tolerance", Tolerance)
@pytest.mark.parametrize("size", [1e-2, 1.0, 1e4])
def test_the_tolerance_is_a_share_of_the_largest_value(tolerance, size):
    want = torch.linspace(-1, 1, 9, dtype=torch.float64) * size
    step = torch.zeros(9, dtype=torch.float64)
    step[4] = size * tolerance.value  # the value there is 0: only the largest one counts
    assert difference(want + 0.9 * step, want, tolerance) is None
    found = difference(want + 1.1 * step, want, tolerance)
    assert found is not None and found.share == pytest.approx(1.1 * tolerance.value)
    assert share_apart(want + step, want) == pytest.approx(tolerance.value)


def test_rounding_around_zero_is_no_difference():
    assert difference(tensor([1e-9, -1e-10]), tensor([0.0, 0.0]), Tolerance.EXACT) is None


def test_the_message_names_the_output_and_the_reason():
    x = tensor([1.0, 2.0])
    assert str(difference((x, x + 1), (x, x))) == "output 1 differs by 0.5 of the largest value"
    assert "size (2,), not (1,)" in str(difference(x, x[:1]))
    assert "2 values, not 1" in str(difference((x, x), x))


def test_values_inside_dataclasses_and_mappings_are_compared():
    @dataclass
    class Out:
        logits: torch.Tensor
        rest: OrderedDict

    make = lambda v: Out(tensor([1.0]), OrderedDict(a=[tensor([v])]))
    assert difference(make(1.0), make(1.0)) is None
    assert difference(make(1.0), make(2.0)) is not None


def test_in_double_an_error_of_rounding_disappears():
    class Sums(nn.Module):
        def __init__(self, order):
            super().__init__()
            self.order = order
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x):
            return sum(x[i] * self.scale for i in self.order)

    x = tensor([1e8, 1.0, -1e8])
    one, other, call = Sums([0, 1, 2]), Sums([0, 2, 1]), Call((x,), {})
    assert difference_of_models(one, other, call) is not None
    assert difference_of_models(one, other, call, digits=True) is None
    assert one.scale.dtype is torch.float32 and x.dtype is torch.float32
