"""From the scores that sparsers give to single layers to the scores of classes of channels."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from sparsebit.sparse.cut.masks import owner_of
from sparsebit.sparse.labels.walk import Walk
from sparsebit.sparse.sparsers.base import cannot_judge

log = logging.getLogger("sparsebit")
Oprs = dict[str, Any]  # module path -> SparseOpr


def class_scores(walk: Walk, oprs: Oprs) -> Tensor:
    """The score of each class; `inf`, so that it is kept, where no sparser judges it.

    Scores that are comparable between layers are added. Other scores are divided by the mean of their layer
    and averaged.
    """
    n = len(walk.labels)
    total = torch.zeros(n, dtype=torch.float64)
    layers = torch.zeros(n, dtype=torch.float64)
    comparable = True
    for cut in walk.slices.values():
        opr, name = owner_of(cut.path, oprs)
        if opr is None or opr.sparser.decides:
            continue
        worth = opr.sparser.channels(opr, name, cut.axis, cut.produces)
        if worth is None:
            continue
        worth = worth.double().cpu()
        roots = walk.labels.roots(cut.labels)
        if not opr.sparser.COMPARABLE:
            worth = worth / worth.mean().clamp_min(1e-30)
            comparable = False
        total.index_add_(0, roots, worth)
        layers.index_add_(0, roots, torch.ones_like(worth))
    scores = total if comparable else total / layers.clamp_min(1)
    return torch.where(layers > 0, scores, float("inf"))


def check_judged(walk: Walk, oprs: Oprs, scores: Tensor, ratios: Tensor) -> None:
    """Raise if layers should lose something and no sparser can judge them; warn if no layer can lose
    anything."""
    asked = [classes[ratios[classes] > 0] for classes in walk.dimensions()]
    every = torch.cat([torch.zeros(0, dtype=torch.long), *asked])
    if bool(scores[every].isfinite().any()) or not bool((ratios > 0).any()):
        return
    made = [walk.labels.roots(part.labels) for part in walk.slices.values() if part.produces]
    if any(bool(torch.isin(roots, every).any()) for roots in made):
        raise cannot_judge(opr.sparser for opr in oprs.values())
    why = next(iter(walk.labels.why_fixed.values()), "it has no layer whose channels another one reads")
    log.warning("no channel of this model can be removed: %s", why)


def class_ratios(walk: Walk, oprs: Oprs, default: float) -> Tensor:
    """For each class, the smallest ratio of the layers that make it: a channel that one of them keeps is
    kept."""
    ratios = torch.full((len(walk.labels),), 2.0, dtype=torch.float64)
    for cut in walk.slices.values():
        opr, _ = owner_of(cut.path, oprs)
        if opr is not None and cut.produces:
            roots = walk.labels.roots(cut.labels)
            own = torch.full(roots.shape, opr.sparser.ratio, dtype=torch.float64)
            ratios.scatter_reduce_(0, roots, own, "amin")
    return torch.where(ratios > 1, default, ratios)
