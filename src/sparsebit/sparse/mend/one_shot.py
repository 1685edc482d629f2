"""After the choice, before the cut: fit layers that read removed channels, in one step.

A removed channel is approximated from the kept ones at the same position: x_d = A x_k with A = H_kk^-1 H_kd,
where H are the second moments of the inputs. Its weights are added to theirs: W_k += W_d A^T. This is the
least-squares answer for a Linear layer (He et al., Channel Pruning, 2017). It works for kernels of any size
and needs one pass and C x C numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from sparsebit.sparse.cut.masks import owner_of
from sparsebit.sparse.cut.surgery import Cut
from sparsebit.sparse.sparsers import base


@torch.no_grad()
def refit(cut: Cut, oprs: dict[str, Any]) -> None:
    """Change the weights of the layers that read removed channels, where moments were collected."""
    for part in cut.walk.slices.values():
        opr, name = owner_of(part.path, oprs)
        if opr is None or name != "weight" or part.produces or part.axis != base.in_axis(opr):
            continue
        h = None
        if getattr(opr, "moments", None) is not None:
            h = opr.moments.matrix()
        kept = cut.keeps(part.labels)
        if h is None or bool(kept.all()) or not bool(kept.any()) or len(h) != len(kept):
            continue
        kept = kept.to(h.device)
        mixing = torch.linalg.solve(h[kept][:, kept], h[kept][:, ~kept])
        weight = opr.weight.detach().double().movedim(part.axis, 0)
        weight[kept] += torch.tensordot(mixing, weight[~kept], 1)
        weight[~kept] = 0
        opr.weight.copy_(weight.movedim(0, part.axis))
