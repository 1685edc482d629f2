"""How many channels each layer loses: a share of every layer, a share of all together, or what a budget
requires."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.numeric.masks import count_of
from sparsebit.sparse.choose.costs import ESTIMATES, EXACT
from sparsebit.sparse.cut.surgery import Cut
from sparsebit.sparse.labels.walk import Walk
from sparsebit.utils.progress import tracked

log = logging.getLogger("sparsebit")
AUTO = 0  # round_to 0: multiples of 8, which kernels prefer, in layers with room for two of them
MULTIPLE = 8
STEPS = 12  # of the bisection: the ratio is then known to 1 / 4096
MOST = 0.99
_KNOWN: WeakKeyDictionary[Walk, dict[int, list[int]]] = WeakKeyDictionary()
OFF = 0.1  # a measured budget may be missed by this share
FEW_LEFT = 0.9  # from this ratio on a warning is due
ROOM = 0.01  # a budget counts as met within this share
FILLS = 32  # so many ratios are tried to fill it


def uniform(walk: Walk, scores: Tensor, ratio: float | Tensor, round_to: int = 1) -> Tensor:
    """The classes with the lowest scores, by dimension; one class of every dimension is kept.

    ratio     the same share of every dimension, or one share per class.
    round_to  a dimension that loses something keeps the nearest multiple of so many channels. It keeps all if it has
              fewer, and none if that is nearest and its layers have other dimensions. 0 (AUTO): a multiple of 8 if it
              has at least 16.
    """
    found = [torch.zeros(0, dtype=torch.long)]
    shares = _shares(walk, ratio, round_to)
    for classes, may_vanish, step in zip(walk.dimensions(), walk.may_vanish(), _steps(walk, round_to)):
        if share := float(shares[classes[0]]):
            keep = len(classes) - count_of(len(classes), share)
            found.append(_worst(classes, scores, keep, step, may_vanish))
    return torch.cat(found)


def together(walk: Walk, scores: Tensor, ratio: float | Tensor, round_to: int = 1) -> Tensor:
    """The classes with the lowest scores in one ranking of all dimensions. Each share has a ranking for its
    classes."""
    found = [torch.zeros(0, dtype=torch.long)]
    shares = _shares(walk, ratio, round_to)
    steps = _steps(walk, round_to)
    for share in shares[shares > 0].unique():
        parts = [classes[shares[classes] == share] for classes in walk.dimensions()]
        every = torch.cat(parts) if parts else found[0]
        worst = every[scores[every].argsort(stable=True)[: count_of(len(every), float(share))]]
        for part, classes, may_vanish, step in zip(parts, walk.dimensions(), walk.may_vanish(), steps):
            if len(part):
                keep = int((~torch.isin(part, worst)).sum())
                may_vanish = may_vanish and len(part) == len(classes)
                found.append(_worst(part, scores, keep, step, may_vanish))
    return torch.cat(found)


def _worst(classes: Tensor, scores: Tensor, keep: int, step: int, may_vanish: bool) -> Tensor:
    multiple = (2 * keep + step) // (2 * step) * step
    least = 0 if may_vanish and step > 1 else step
    return classes[scores[classes].argsort(stable=True)[: max(len(classes) - max(multiple, least), 0)]]


def _steps(walk: Walk, round_to: int) -> list[int]:
    """For each dimension, how many classes make a multiple of `round_to` channels in every layer that has
    them."""
    known = _KNOWN.setdefault(walk, {})  # a budget asks dozens of times
    if round_to not in known:
        known[round_to] = _find_steps(walk, round_to)
    return known[round_to]


def _find_steps(walk: Walk, round_to: int) -> list[int]:
    # per class; where layers differ, the common divisor
    channels = torch.zeros(len(walk.labels), dtype=torch.long)
    for _, attribute, labels in walk.sizes if round_to != 1 else ():
        if "groups" not in attribute:
            roots, counts = walk.labels.roots(labels).unique(return_counts=True)
            channels[roots] = torch.gcd(channels[roots], counts)
    channels.clamp_(min=1)
    found = []
    for classes in walk.dimensions():
        multiple = round_to
        if round_to == AUTO:
            multiple = 1
            if int(channels[classes].sum()) >= 2 * MULTIPLE:
                multiple = MULTIPLE
        found.append(multiple // math.gcd(multiple, *channels[classes].tolist()))
    return found


def _shares(walk: Walk, ratio: float | Tensor, round_to: int) -> Tensor:
    if not isinstance(ratio, Tensor) and not 0 <= ratio < 1:
        raise ConfigError(f"ratio: must be at least 0 and below 1, got {ratio}")
    if round_to < 0:
        raise ConfigError(f"round_to: must be at least 0, got {round_to}")
    return torch.as_tensor(ratio, dtype=torch.float64).expand(len(walk.labels))


def within(
    walk: Walk,
    choose: Callable[[float], Tensor],
    of: str,
    budget: float,
    round_to: int = 1,
    progress: bool | None = False,
) -> Tensor:
    """The smallest ratio whose model has at most `budget` of the macs, params or latency of the whole model."""
    if not 0 < budget <= 1:
        raise ConfigError(f"{of}: must be above 0 and at most 1, got {budget}")
    exact = EXACT[of](walk)
    whole = exact(walk.gm)
    if not whole:
        raise ConfigError(
            f"{of}: the model has none on this example, so a share of them is not a budget; give ratio instead"
        )
    limit = budget * whole
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
        least = exact(Cut(walk, choose(MOST)).compact()) / whole
        stays = sorted(set(walk.labels.why_fixed.values()))
        if len(stays) > 3:
            more = [f"and {len(stays) - 3} more"]
        else:
            more = []
        if round_to > 1:
            first = [f"layers with no more than {round_to} channels (round_to)"]
        else:
            first = []
        raise ConfigError(
            f"{of}: {budget} cannot be reached: the smallest model keeps {least:.3g}; this cannot be cut: "
            f"{'; '.join([*first, *stays[:3], *more]) or 'one channel of everything'}"
        )
    ratio = _bisect(lambda ratio: fits(Cut(walk, choose(ratio))), low, progress)[1]
    if of not in ESTIMATES:
        _check_measured(of, budget, ratio, exact(Cut(walk, choose(ratio)).compact()) / whole)
    return choose(ratio)


def _check_measured(of: str, budget: float, ratio: float, left: float) -> None:
    """Warn if a second measurement of the latency differs from the first."""
    if left > budget * (1 + OFF):
        log.warning("%s: %.2f was asked for, measured again it is %.2f", of, budget, left)
    if ratio > FEW_LEFT:
        log.warning("%s: %.2f takes %.0f %% of the channels; ask for more", of, budget, 100 * ratio)


def _filled(walk: Walk, choose: Callable[[float], Tensor], ratio: float, room: Callable[[Cut], float]) -> Cut:
    """The removed classes at `ratio`, without those for which there is `room`. With `round_to`, equal layers
    lose many at once."""
    cut = Cut(walk, choose(ratio))
    left = room(cut)
    refused = set[tuple[int, ...]]()
    for less in torch.linspace(ratio, 0, FILLS).tolist():
        if left < ROOM:
            break
        stays = ~torch.isin(cut.dropped, choose(less))
        for classes in walk.dimensions():
            given = stays & torch.isin(cut.dropped, classes)
            key = tuple(cut.dropped[given].tolist())
            if not key or key in refused:  # room only shrinks
                continue
            tried = Cut(walk, cut.dropped[~given])
            if (after := room(tried)) >= 0:
                cut = tried
                left = after
                stays = stays[~given]
            else:
                refused.add(key)
    return cut


def _bisect(fits: Callable[[float], bool], low: float, progress: bool | None) -> tuple[float, float]:
    """The largest ratio known not to fit (or the least ratio), and the smallest that fits; MOST if none fits."""
    high = MOST
    for _ in tracked(range(STEPS), progress, "pruning"):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low, high
