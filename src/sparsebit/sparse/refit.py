"""After the choice, before the cut: layers that read what goes are refit, and batch norms re-estimated.

A removed channel is approximated, position by position, from the kept ones, x_d = A x_k with A = H_kk^-1 H_kd of the
inputs' second moments H, and its weights are added to theirs: W_k += W_d A^T. That is the least-squares answer for a
Linear layer (He et al., Channel Pruning, 2017), works for kernels of any size, and needs one pass and C x C numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from sparsebit.graph.training import evaluating
from sparsebit.sparse.masking import owner_of
from sparsebit.sparse.sparsers import base
from sparsebit.sparse.surgery import Cut

DAMPING = 1e-3  # of the mean energy, added to every channel's
FEW = 16  # samples: a layer that is fitted to less may do worse on others
PRIOR = 32  # values: what a batch norm knew before counts as so many


class Moments:
    """Second moments of what a layer reads, between its input channels."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.rows = 0

    @staticmethod
    def wanted(layer: Any) -> bool:
        return base.is_weighted(layer) and getattr(layer, "groups", 1) == 1

    def add(self, layer: Any, x: Any) -> None:
        if isinstance(x, Tensor) and x.is_floating_point():
            rows = x.detach().float().movedim(base.input_axis(layer, x), -1).flatten(0, -2)
            square = rows.T @ rows
            self.total = square if self.total is None else self.total + square
            self.rows += len(rows)

    def matrix(self) -> Tensor | None:
        if self.total is None:
            return None
        h = self.total.double()
        return h + DAMPING * h.diagonal().mean().clamp_min(1e-30) * torch.eye(
            len(h), dtype=h.dtype, device=h.device
        )


@torch.no_grad()
def refit(cut: Cut, oprs: dict[str, Any]) -> None:
    """Change the weights of the layers that read what `cut` removes, where data was seen."""
    for part in cut.walk.slices.values():
        opr, name = owner_of(part.path, oprs)
        if opr is None or name != "weight" or part.produces or part.axis != base.in_axis(opr):
            continue
        h = opr.moments.matrix() if getattr(opr, "moments", None) is not None else None
        kept = cut.keeps(part.labels)
        if h is None or bool(kept.all()) or not bool(kept.any()) or len(h) != len(kept):
            continue
        kept = kept.to(h.device)
        mixing = torch.linalg.solve(h[kept][:, kept], h[kept][:, ~kept])
        weight = opr.weight.detach().double().movedim(part.axis, 0)
        weight[kept] += torch.tensordot(mixing, weight[~kept], 1)
        weight[~kept] = 0
        opr.weight.copy_(weight.movedim(0, part.axis))


# -- batch norms -----------------------------------------------------------------------------------------
@torch.no_grad()
def reestimate(model: nn.Module, calls: Iterable[tuple[Any, Any]]) -> int:
    """Running statistics of batch norms, anew: of all that these calls show them. Returns how many norms there are."""
    norms: list[Any] = [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
    if not norms:
        return 0
    old = [(norm, norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]
    hooks = [norm.register_forward_pre_hook(_Statistics(norm), with_kwargs=True) for norm in norms]
    try:
        with evaluating(model):
            for args, kwargs in calls:
                model(*args, **kwargs)
    except BaseException:
        for norm, mean, var in old:
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(var)
        raise
    finally:
        for hook in hooks:
            hook.remove()
    return len(norms)


class _Statistics:
    """A norm's own, from all that it has read so far; the old ones count as PRIOR values, so two samples do no harm."""

    def __init__(self, norm: Any):
        self.count = float(PRIOR)
        self.mean, self.var = norm.running_mean.double(), norm.running_var.double()

    def __call__(self, norm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = (args[0] if args else kwargs["input"]).detach().float()
        n = x.numel() // max(norm.num_features, 1)
        if not n:
            return
        alone = isinstance(norm, _InstanceNorm)  # a sample by itself, with or without a batch around it
        others = [*range(1 - norm._get_no_batch_dim(), 0)] if alone else [0, *range(2, x.dim())]
        var, mean = (
            v.double().view(-1, norm.num_features).mean(0) for v in torch.var_mean(x, others, correction=0)
        )
        share, apart = n / (self.count + n), mean - self.mean
        between = 0 if alone else (1 - share) * apart.square()
        self.count += n
        self.mean = self.mean + share * apart
        self.var = (1 - share) * self.var + share * (var + between)
        norm.running_mean.copy_(self.mean)
        norm.running_var.copy_(self.var)
