"""Bits per layer under a budget: the choice with the least total error, exactly.

min sum_i error[i, b_i] subject to sum_i size_i * b_i <= budget, by dynamic programming over the budget in units of
the sizes' common divisor. Sizes of one model share large divisors, so the table is small; where it would not be,
sizes are rounded up to a coarser unit and the budget still holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from sparsebit.errors import ConfigError

MOST_UNITS = 200_000


def allocate(errors: Sequence[Mapping[int, float]], sizes: Sequence[int], average_bits: float) -> list[int]:
    """The bits of each layer; errors[i] maps each width that layer i may have to its error."""
    lowest = sum(size * min(e) for e, size in zip(errors, sizes)) / max(sum(sizes), 1)
    if average_bits < lowest - 1e-9:
        raise ConfigError(
            f"average_bits: {average_bits} is below the narrowest choice ({lowest:g}); add a smaller candidate"
        )
    budget = math.floor(average_bits * sum(sizes) + 1e-6)
    unit = math.gcd(*sizes)
    unit *= max(1, -(-budget // unit // MOST_UNITS))
    units = [-(-size // unit) for size in sizes]
    room = budget // unit
    if room < sum(u * min(e) for e, u in zip(errors, units)):  # only where sizes were rounded up
        return [min(e) for e in errors]
    best = np.zeros(room + 1)  # least error with at most so many units, over the layers so far
    choices = []
    for e, size in zip(errors, units):
        table = np.full((len(e), room + 1), np.inf)
        for row, bits in enumerate(e):
            cost = bits * size
            if cost <= room:
                table[row, cost:] = best[: room + 1 - cost] + e[bits]
        choices.append(table.argmin(0))
        best = table.min(0)
    taken = []
    left = room
    for e, size, choice in zip(reversed(errors), reversed(units), reversed(choices)):
        bits = list(e)[int(choice[left])]
        taken.append(bits)
        left -= bits * size
    return taken[::-1]
