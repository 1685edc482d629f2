"""Running statistics of batch norms, estimated again for a model that lost channels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from sparsebit.graph.run.modes import evaluating

PRIOR = 32  # values: the old statistics count as so many


@torch.no_grad()
def reestimate(model: nn.Module, calls: Iterable[tuple[Any, Any]]) -> int:
    """Estimate the running statistics of batch norms again on `calls`; returns the number of norms."""
    norms: list[Any] = [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
    if not norms:
        return 0
    old = [(norm, norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]
    hooks = [norm.register_forward_pre_hook(_Statistics(norm), with_kwargs=True) for norm in norms]
    try:
        with evaluating(model):
            for args, kwargs in calls:
                model(*args, **kwargs)
    except BaseException:  # also on Ctrl-C
        for norm, mean, var in old:
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(var)
        raise
    finally:
        for hook in hooks:
            hook.remove()
    return len(norms)


class _Statistics:
    """The statistics of one norm over everything that it has read so far. The old statistics count as PRIOR
    values, so two samples do no harm."""

    def __init__(self, norm: Any):
        self.count = float(PRIOR)
        self.mean = norm.running_mean.double()
        self.var = norm.running_var.double()

    def __call__(self, norm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = (args[0] if args else kwargs["input"]).detach().float()
        n = x.numel() // max(norm.num_features, 1)
        if not n:
            return
        alone = isinstance(norm, _InstanceNorm)  # each sample counts alone, with or without a batch axis
        if alone:
            others = [*range(1 - norm._get_no_batch_dim(), 0)]
        else:
            others = [0, *range(2, x.dim())]
        var, mean = (
            v.double().view(-1, norm.num_features).mean(0) for v in torch.var_mean(x, others, correction=0)
        )
        share = n / (self.count + n)
        apart = mean - self.mean
        between = 0 if alone else (1 - share) * apart.square()
        self.count += n
        self.mean = self.mean + share * apart
        self.var = (1 - share) * self.var + share * (var + between)
        norm.running_mean.copy_(self.mean)
        norm.running_var.copy_(self.var)
