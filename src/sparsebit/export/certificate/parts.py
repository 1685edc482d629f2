"""Parts of one output whose values are of another size: scores behind boxes in pixels, in one tensor.

Compared as a whole, the loud part hides a quiet one that is wrong. So places on one axis whose values are ten times
smaller than all others make a part that is compared by itself, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

GAP = 10.0  # between the sizes of two parts
LEAST = 1e-6  # of the loudest part: smaller values are rounding of the loud ones


@dataclass(frozen=True)
class Part:
    """Places on one axis of an output."""

    axis: int
    places: tuple[int, ...]
    size: int  # of the axis

    def name_in(self, output: str) -> str:
        first = self.places[0]
        last = self.places[-1]
        if len(self.places) == last - first + 1:
            return f"{output}[{':, ' * self.axis}{first}:{last + 1}]"
        return f"{output}, {len(self.places)} of {self.size} places on axis {self.axis}"

    def fits(self, *arrays: Array) -> bool:
        shapes = {array.shape for array in arrays}
        return len(shapes) == 1 and arrays[0].ndim > self.axis and arrays[0].shape[self.axis] == self.size

    def of(self, array: Array) -> Array:
        """(batch, 1, 1, values): nothing here is an axis of classes."""
        found = np.take(array, self.places, axis=self.axis)
        return found.reshape(len(found), 1, 1, -1)


class Parts:
    """The parts of every output, as its first values tell: the same for all runs that are compared."""

    def __init__(self) -> None:
        self.known: dict[str, list[Part]] = {}

    def of(self, name: str, values: Array) -> list[Part]:
        if name not in self.known:
            self.known[name] = parts_of(values)
        return self.known[name]


def parts_of(x: Array) -> list[Part]:
    """All but the loudest part, on the axis where the sizes lie furthest apart; the first axis is that of the batch."""
    if x.dtype.kind != "f" or x.ndim < 2 or not x.size:
        return []
    found = max((_on_axis(x, axis) for axis in range(1, x.ndim)), key=lambda found: found[0])
    return found[1]


def _on_axis(x: Array, axis: int) -> tuple[float, list[Part]]:
    """The largest gap between sizes, and the parts below the gaps."""
    others = tuple(i for i in range(x.ndim) if i != axis)
    finite = np.nan_to_num(x, posinf=0, neginf=0).astype(np.float64)
    sizes = np.sqrt((finite**2).mean(others))
    places = np.argsort(sizes, kind="stable")
    places = places[sizes[places] > LEAST * sizes.max()]
    ratios = sizes[places[1:]] / sizes[places[:-1]]
    cuts = np.flatnonzero(ratios >= GAP) + 1
    groups = np.split(places, cuts)[:-1]
    parts = []
    for group in groups:
        parts.append(Part(axis, tuple(sorted(int(i) for i in group)), x.shape[axis]))
    return float(ratios.max(initial=1.0)), parts
