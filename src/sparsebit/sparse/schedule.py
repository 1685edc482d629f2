"""Schedule: prune a little at a time while a model trains.

    schedule = Schedule(smodel, steps=1000, every=50)
    ...
    optimizer.step()
    schedule.step()

cubic: Zhu and Gupta, To prune, or not to prune, 2017: fast at first, slow towards the end.
"""

from __future__ import annotations

from typing import Any

from sparsebit.errors import ConfigError

SHAPES = {"cubic": lambda t: 1 - (1 - t) ** 3, "linear": lambda t: t, "one-shot": lambda t: 1.0}


class Schedule:
    """Computes the masks again every `every` calls of step(), from step `start` on, for `steps` calls."""

    def __init__(self, smodel: Any, steps: int, every: int = 1, start: int = 0, shape: str = "cubic"):
        if shape not in SHAPES:
            raise ConfigError(f"shape: {shape!r} is not one of {', '.join(SHAPES)}")
        if steps < 1 or every < 1 or start < 0:
            raise ConfigError(
                f"steps and every must be at least 1, start at least 0: {steps}, {every}, {start}"
            )
        self.smodel = smodel
        self.steps = steps
        self.every = every
        self.start = start
        self.shape = shape
        self.count = 0

    @property
    def share(self) -> float:
        """The part of the ratios that is due now."""
        done = (self.count - self.start) / self.steps
        if done <= 0:
            return 0.0
        return float(SHAPES[self.shape](min(done, 1.0)))

    def step(self) -> None:
        """Call it after every optimizer step, or every epoch: the unit is free."""
        self.count += 1
        done = self.count - self.start
        due = done % self.every == 0 or done == self.steps
        if self.shape == "one-shot":
            due = done == 1
        if due and 0 < done <= self.steps:
            self.smodel.calc_params(share=self.share)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state`. The masks are in the state of the model."""
        self.count = state["count"]
