"""Masks of single weights: a share of every layer, of all together, or n of every m."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from sparsebit.numeric.masks import keep_best, keep_best_of_all, n_of_m
from sparsebit.sparse.choose.plugin_masks import mask_by_sparser
from sparsebit.sparse.sparsers.base import by_output, cannot_judge


def mask_single_weights(oprs: dict[str, Any], share: float) -> None:
    """Set the masks of all layers as their sparsers are configured; `share` is the part of the ratios that is
    due.

    With SCOPE: global, layers of one ratio compete. A layer with another ratio loses exactly that.
    """
    ranked: dict[float, list[tuple[Tensor, Tensor]]] = {}
    asked = [(path, opr, name) for path, opr, name in _matrices(oprs) if opr.sparser.ratio * share]
    judged = [(path, opr, name) for path, opr, name in asked if not opr.sparser.skips(opr)]
    if asked and not judged:
        raise cannot_judge(opr.sparser for _, opr, _ in asked)
    for path, opr, name in judged:
        sparser = opr.sparser
        mask = opr.mask_of(name)
        ratio = opr.sparser.ratio * share
        if sparser.decides:
            mask.copy_(mask_by_sparser(opr, name, path, share))
            continue
        solved = sparser.solve(opr, ratio, sparser.pattern)
        if solved is not None:
            opr.get_parameter(name).copy_(solved[0])
            mask.copy_(solved[1])
            continue
        worth = sparser.weights(opr, name)
        if sparser.pattern is None and sparser.cfg.scope == "global":
            ranked.setdefault(ratio, []).append((worth, mask))
            continue
        rows = by_output(opr, name, worth)
        if sparser.pattern:
            kept = n_of_m(rows, *sparser.pattern)
        else:
            kept = keep_best(rows, ratio, sparser.PER_ROW)
        mask.copy_(by_output(opr, name, kept))
    for ratio, layers in ranked.items():
        for (_, mask), new in zip(layers, keep_best_of_all([worth for worth, _ in layers], ratio)):
            mask.copy_(new)


def _matrices(oprs: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for path, opr in oprs.items():
        for name, p in opr.layer_parameters().items():
            if p.dim() > 1 and not isinstance(opr, nn.Embedding) and not opr.masks_itself:
                yield path, opr, name
