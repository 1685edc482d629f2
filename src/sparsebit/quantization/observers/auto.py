"""Auto: several ranges of the same values, of which calibration takes the one with the least error.

The observers of CANDIDATES see every batch. calibration/range_choice.py compares their ranges by the output of the
layer that reads the values, and by the outputs of the model. Without it, the first candidate decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field
from torch import Tensor

from sparsebit.config import Config
from sparsebit.quantization.observers import OBSERVERS_MAP, register_observer
from sparsebit.quantization.observers.base import Observer

if TYPE_CHECKING:
    from typing_extensions import Self

CANDIDATES = ("mean_minmax", "minmax", "moving_average", "percentile", "mse")


@register_observer
class AutoObserver(Observer):
    TYPE = "auto"

    class Params(Config):
        min_values: int = Field(16384, ge=1, description="of mean_minmax: smaller images are taken together")

    def __init__(self, config: Any, qdesc: Any):
        mean = {"OBSERVER.MEAN_MINMAX.MIN_VALUES": config.observer.params("auto").min_values}
        own = config.override(*(part for pair in mean.items() for part in pair))
        self.members: dict[str, Observer] = {}
        super().__init__(config, qdesc)
        self.members = {name: OBSERVERS_MAP[name](own, qdesc) for name in CANDIDATES}

    def reset(self) -> None:
        super().reset()
        for member in self.members.values():
            member.reset()

    def observe(self, x: Tensor) -> None:
        for member in self.members.values():
            member.observe(x)
        first = self.members["minmax"]
        assert first.low is not None and first.high is not None
        self._extend(first.low, first.high, 1)

    def merge(self, other: Self) -> None:
        super().merge(other)
        for name, member in self.members.items():
            member.merge(other.members[name])

    def ranges(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """The range of each candidate."""
        found = {}
        for name, member in self.members.items():
            low, high = member.calc_minmax()
            found[name] = (
                low.float().reshape(-1).to(self.device),
                high.float().reshape(-1).to(self.device),
            )
        return found

    def calc_minmax(self) -> tuple[Tensor, Tensor]:
        return self.members[CANDIDATES[0]].calc_minmax()


Observer = AutoObserver  # type: ignore[misc]
