"""Masks of single weights: a share of every layer, of all together, or n of every m."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from sparsebit.numeric.masks import keep_best, keep_best_of_all, n_of_m


def mask_single_weights(section: Any, oprs: dict[str, Any], share: float) -> None:
    """Set the masks of all layers; `section` is SPARSER of the config, `share` how much of the ratios is due."""
    pattern = tuple(map(int, section.pattern.split(":"))) if section.pattern else None
    ranked: list[tuple[Tensor, Tensor]] = []
    for opr, name in _matrices(oprs):
        sparser, mask = opr.sparser, opr.mask_of(name)
        ratio = sparser.ratio * share
        if sparser.skips(opr) or (pattern is None and not ratio):
            continue
        solved = sparser.solve(opr, ratio, pattern)
        if solved is not None:
            opr.get_parameter(name).copy_(solved[0])
            mask.copy_(solved[1])
        elif pattern is not None:
            mask.copy_(n_of_m(sparser.weights(opr, name), *pattern))
        elif section.scope == "global":
            ranked.append((sparser.weights(opr, name), mask))
        else:
            mask.copy_(keep_best(sparser.weights(opr, name), ratio, sparser.PER_ROW))
    if ranked:
        chosen = keep_best_of_all([worth for worth, _ in ranked], section.ratio * share)
        for (_, mask), new in zip(ranked, chosen):
            mask.copy_(new)


def _matrices(oprs: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    for opr in oprs.values():
        for name, p in opr.layer_parameters().items():
            if p.dim() > 1 and not isinstance(opr, nn.Embedding):
                yield opr, name
