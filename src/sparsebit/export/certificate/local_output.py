"""One output of the file, computed by the model from the runtime's own codes: what differs now is float rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sparsebit.export.certificate.end_to_end import check_output, check_part, difference, is_whole, largest_of
from sparsebit.export.certificate.parts import Part
from sparsebit.export.certificate.runtime import Array

Others = Callable[[], list[Array]]  # the same output, the ops of the model rounded otherwise
MORE_LABELS = 0.01  # of all labels: float rounding decides between equal scores
EXPLAINS = 10.0  # times what float rounding moves a quiet part
LOUDER = (
    0.1  # of the largest value of the whole output: errors of a quiet part beyond that are never rounding
)


@dataclass
class LocalOutput:
    """Its worst batch: the largest difference as a share of the largest value, or the share of labels that differ."""

    error: float = 0.0
    allowed: float = 1.0
    holds_labels: bool = False

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.allowed

    def __str__(self) -> str:
        if self.holds_labels:
            return f": {self.error:.2%} of its values differ; {self.allowed:.2%} may"
        if math.isinf(self.error):
            return " has NaN or infinite values in other places than the model's"
        return f" is off by {self.error:.2g} of the largest value"

    def compare(self, expected: Array, found: Array, rounding: float, others: Others) -> None:
        """One batch."""
        self.holds_labels = is_whole(expected)
        if self.holds_labels:
            self._keep(check_output([expected], [found]), self._labels_that_may(expected, found, others))
        else:
            self._keep(check_output([expected], [found]), rounding)

    def compare_part(
        self, part: Part, expected: Array, found: Array, rounding: float, others: Others
    ) -> None:
        """One batch of a part, as a share of the part's own largest value."""
        error = check_part(part, expected, found, 0.0)
        allowed = rounding
        if error > rounding:
            size = max(largest_of(part.of(expected)), 1e-12)
            most = rounding * max(LOUDER * largest_of(expected) / size, 1.0)
            explained = max(check_part(part, expected, other, 0.0) for other in others())
            allowed = min(max(EXPLAINS * explained, rounding), most)
        self._keep(error, allowed)

    @staticmethod
    def _labels_that_may(expected: Array, found: Array, others: Others) -> float:
        """The number of labels that may flip because ops round differently: at least one, but at most one of a
        hundred."""
        if np.array_equal(expected, found) or not expected.size:
            return MORE_LABELS
        flipped = max(int((difference(expected, other) > 0).sum()) for other in others())
        may = max(flipped + 3 * math.sqrt(flipped), 1.0)
        return min(may / expected.size, MORE_LABELS)

    def _keep(self, error: float, allowed: float) -> None:
        if error / allowed >= self.error / self.allowed:
            self.error = error
            self.allowed = allowed
