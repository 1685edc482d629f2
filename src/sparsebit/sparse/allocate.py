"""How much goes where: a share of every layer, of all together, or what a budget asks for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.graph.feeding import tracked
from sparsebit.numeric.masks import count_of
from sparsebit.sparse.channels import Walk
from sparsebit.sparse.costs import ESTIMATES, EXACT
from sparsebit.sparse.surgery import Cut

STEPS = 12  # of the bisection: the ratio is then known to 1 / 4096
MOST = 0.99
ROOM, FILLS = 0.01, 32  # a budget that is met to a hundredth is met; ratios tried to fill it


def uniform(walk: Walk, scores: Tensor, ratio: float | Tensor, round_to: int = 1) -> Tensor:
    """The classes of least score go: the same share of every dimension, or a share per class; one stays everywhere.

    With `round_to` every dimension keeps the nearest multiple of it: all, where it has fewer, and none, where that is
    nearest and the layers have others.
    """
    _check(ratio, round_to)
    found = [torch.zeros(0, dtype=torch.long)]
    for classes, may_vanish in zip(walk.dimensions(), walk.may_vanish()):
        share = float(ratio[classes[0]]) if isinstance(ratio, Tensor) else ratio
        keep = len(classes) - count_of(len(classes), share)
        found.append(_worst(classes, scores, keep, round_to, may_vanish))
    return torch.cat(found)


def together(walk: Walk, scores: Tensor, ratio: float, may_go: Tensor, round_to: int = 1) -> Tensor:
    """The classes of least score go, of all dimensions in one ranking; `may_go` says which of them take part."""
    _check(ratio, round_to)
    found = [
        (classes[may_go[classes]], may_vanish and bool(may_go[classes].all()))
        for classes, may_vanish in zip(walk.dimensions(), walk.may_vanish())
    ]
    found = [(classes, may_vanish) for classes, may_vanish in found if len(classes)]
    if not found:
        return torch.zeros(0, dtype=torch.long)
    every = torch.cat([classes for classes, _ in found])
    worst = every[scores[every].argsort(stable=True)[: count_of(len(every), ratio)]]
    keep = [int((~torch.isin(classes, worst)).sum()) for classes, _ in found]
    return torch.cat([_worst(c, scores, k, round_to, v) for (c, v), k in zip(found, keep)])


def _worst(classes: Tensor, scores: Tensor, keep: int, round_to: int, may_vanish: bool) -> Tensor:
    multiple = (2 * keep + round_to) // (2 * round_to) * round_to
    least = 0 if may_vanish and round_to > 1 else round_to
    return classes[scores[classes].argsort(stable=True)[: max(len(classes) - max(multiple, least), 0)]]


def _check(ratio: float | Tensor, round_to: int) -> None:
    if not isinstance(ratio, Tensor) and not 0 <= ratio < 1:
        raise ConfigError(f"ratio: must be at least 0 and below 1, got {ratio}")
    if round_to < 1:
        raise ConfigError(f"round_to: must be at least 1, got {round_to}")


def within(
    walk: Walk, choose: Callable[[float], Tensor], of: str, budget: float, progress: bool | None = False
) -> Tensor:
    """The smallest ratio whose model has at most `budget` of the whole one's macs, params or latency."""
    if not 0 < budget <= 1:
        raise ConfigError(f"budget: must be above 0 and at most 1, got {budget}")
    exact = EXACT[of](walk)
    limit = budget * exact(walk.gm)
    fits = lambda cut: exact(cut.compact()) <= limit
    low = 0.0
    if of in ESTIMATES:
        estimate = ESTIMATES[of](walk)
        room = lambda cut: 1 - estimate(cut) / limit
        low, high = _bisect(lambda ratio: room(Cut(walk, choose(ratio))) >= 0, low, progress)
        for cut in (_filled(walk, choose, high, room), Cut(walk, choose(high))):
            if fits(cut):
                return cut.dropped
        low = high
    if not fits(Cut(walk, choose(MOST))):
        least = exact(Cut(walk, choose(MOST)).compact()) / limit * budget
        raise ConfigError(
            f"budget: {budget} cannot be reached, {least:.2f} is left when one channel of everything stays; "
            f"what cannot be cut is in the report"
        )
    return choose(_bisect(lambda ratio: fits(Cut(walk, choose(ratio))), low, progress)[1])


def _filled(walk: Walk, choose: Callable[[float], Tensor], ratio: float, room: Callable[[Cut], float]) -> Cut:
    """What goes at `ratio`, less what fits into `room`: with `round_to`, layers of one size lose much at once."""
    cut = Cut(walk, choose(ratio))
    for less in torch.linspace(ratio, 0, FILLS).tolist():
        if room(cut) < ROOM:
            break
        stays = ~torch.isin(cut.dropped, choose(less))
        for classes in walk.dimensions():
            given = stays & torch.isin(cut.dropped, classes)
            if given.any() and room(tried := Cut(walk, cut.dropped[~given])) >= 0:
                cut, stays = tried, stays[~given]
    return cut


def _bisect(fits: Callable[[float], bool], low: float, progress: bool | None) -> tuple[float, float]:
    """A ratio that does not fit, or the least, and the next above it that does; MOST if none does."""
    high = MOST
    for _ in tracked(range(STEPS), progress, "pruning"):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low, high
