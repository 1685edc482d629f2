"""Bits under a budget, against trying everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebit.errors import ConfigError
from sparsebit.llm.walk import bit_budget as module
from sparsebit.llm.walk.bit_budget import allocate

layers = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.floats(0.0, 10.0), min_size=3, max_size=3)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=80, deadline=None)
@given(layers=layers, average=st.floats(2.0, 4.5))
def test_is_the_best_choice_there_is(layers, average):
    sizes = [size for size, _ in layers]
    errors = [dict(zip((2, 3, 4), e)) for _, e in layers]
    chosen = allocate(errors, sizes, average)
    budget = average * sum(sizes) + 1e-6
    assert sum(b * s for b, s in zip(chosen, sizes)) <= budget
    total = lambda bits: sum(e[b] for e, b in zip(errors, bits))
    fitting = [
        total(bits)
        for bits in itertools.product((2, 3, 4), repeat=len(sizes))
        if sum(b * s for b, s in zip(bits, sizes)) <= budget
    ]
    assert total(chosen) == pytest.approx(min(fitting), abs=1e-9)


def test_sensitive_layers_get_the_bits():
    errors = [{2: 9.0, 4: 0.1}, {2: 1.0, 4: 0.1}, {2: 1.0, 4: 0.1}]
    assert allocate(errors, [100, 100, 100], 2.7) == [4, 2, 2]


def test_a_budget_that_cannot_be_met_is_refused():
    with pytest.raises(ConfigError, match="below the narrowest choice"):
        allocate([{3: 1.0, 4: 0.5}], [10], 2.5)


def test_awkward_sizes_stay_within_the_budget(monkeypatch):
    monkeypatch.setattr(module, "MOST_UNITS", 50)
    sizes = [10_007, 20_011, 30_013, 40_009]  # no common divisor
    errors = [{2: 5.0 / (i + 1), 3: 2.0 / (i + 1), 4: 1.0 / (i + 1)} for i in range(4)]
    chosen = allocate(errors, sizes, 3.2)
    assert sum(b * s for b, s in zip(chosen, sizes)) <= 3.2 * sum(sizes)
    assert max(chosen) > 2
