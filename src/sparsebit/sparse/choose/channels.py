"""Choose channels: the least important ones, as many as ratios or a budget require, and those that plug-ins
mask."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from sparsebit.errors import ConfigError
from sparsebit.sparse.choose import allocate
from sparsebit.sparse.choose.plugin_masks import decisions
from sparsebit.sparse.choose.scores import check_judged, class_ratios, class_scores
from sparsebit.sparse.cut.masks import oprs_of, without_masks
from sparsebit.sparse.cut.surgery import Cut
from sparsebit.sparse.labels.walk import Walk
from sparsebit.sparse.sparse_config import SparserConfig

log = logging.getLogger("sparsebit")


@dataclass(frozen=True)
class Amount:
    """How much is removed: the ratios of the config, the part of them that is due, or a budget."""

    section: SparserConfig
    share: float
    budget: Mapping[str, float]


def choose_channels(
    model: fx.GraphModule, walk: Walk, amount: Amount, decided: dict[str, Any], progress: bool | None
) -> Cut:
    """The channels to remove. `decided` holds the results of layers with their own calc_mask()."""
    section = amount.section
    share = amount.share
    budget = amount.budget
    oprs = oprs_of(model)
    scores = class_scores(walk, oprs)
    ratios = class_ratios(walk, oprs, section.ratio)
    if budget and not bool((ratios > 0).any()):
        raise ConfigError(
            "RATIO: is 0 for every layer, so nothing may be removed; a budget needs a RATIO above 0"
        )
    judged, removed = decisions(walk, oprs, decided, share)
    if not bool(judged.any()):
        check_judged(walk, oprs, scores, ratios)
    elif budget:
        raise ConfigError(f"{next(iter(budget))}: a budget needs a sparser with weights(), not calc_mask()")
    ratios[without_masks(model, walk)] = 0.0
    known = scores.isfinite() & (ratios > 0) & ~judged
    if section.scope == "global":
        spread = allocate.together
    else:
        spread = allocate.uniform

    def dropped_with(round_to: int) -> Tensor:
        def choose(ratio: float) -> Tensor:
            shares = torch.where(known, ratio if budget else ratios * ratio, 0.0).clamp(max=allocate.MOST)
            return spread(walk, scores, shares, round_to)

        if budget:
            ((name, left),) = budget.items()
            return allocate.within(walk, choose, name, left, round_to, progress)
        decided = [classes[removed[classes] & (ratios[classes] > 0)] for classes in walk.dimensions()]
        return torch.cat([choose(share), *decided])

    if section.round_to == allocate.AUTO:
        dropped = _rounded(dropped_with)
    else:
        dropped = dropped_with(section.round_to)
    if section.round_to > 1 and share == 1 and bool(known.any()) and not len(dropped):
        log.warning("round_to %d: no layer has enough channels to remove some", section.round_to)
    return Cut(walk, dropped)


def _rounded(dropped_with: Callable[[int], Tensor]) -> Tensor:
    """Keep multiples of 8 where that removes enough; otherwise keep any number of channels."""
    try:
        dropped = dropped_with(allocate.AUTO)
    except ConfigError as error:
        log.info("round_to: %s; layers may keep any number of channels", error)
        dropped = None
    if dropped is not None and len(dropped):
        return dropped
    return dropped_with(1)
