"""How much goes where: the same share everywhere, or as much as a budget of MACs or parameters asks for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sparsebit.errors import ConfigError
from sparsebit.sparse.channels import Walk
from sparsebit.sparse.surgery import Cut

STEPS = 12  # of the bisection: the ratio is then known to 1 / 4096
MOST = 0.99


def uniform(walk: Walk, scores: Tensor, ratio: float, round_to: int = 1) -> Tensor:
    """The classes of least score go, the same share of every dimension; one stays everywhere.

    With `round_to` the number of channels that a layer keeps is a multiple of it, where the layer has as many.
    """
    if not 0 <= ratio < 1:
        raise ConfigError(f"ratio: must be at least 0 and below 1, got {ratio}")
    if round_to < 1:
        raise ConfigError(f"round_to: must be at least 1, got {round_to}")
    found = [torch.zeros(0, dtype=torch.long)]
    for classes in walk.dimensions():
        keep = max(len(classes) - int(len(classes) * ratio), 1)
        keep = min(-(-keep // round_to) * round_to, len(classes))
        found.append(classes[scores[classes].argsort(stable=True)[: len(classes) - keep]])
    return torch.cat(found)


def within(
    walk: Walk, choose: Callable[[float], Tensor], cost: Callable[[nn.Module], int], budget: float
) -> Tensor:
    """The smallest ratio whose model costs at most `budget` of the whole one."""
    if not 0 < budget <= 1:
        raise ConfigError(f"budget: must be above 0 and at most 1, got {budget}")
    whole, low, high = cost(walk.gm), 0.0, MOST
    least = cost(Cut(walk, choose(high)).compact())
    if least > budget * whole:
        raise ConfigError(
            f"budget: {budget} cannot be reached, {least / whole:.2f} is left when one channel of everything stays; "
            f"what cannot be cut is in the report"
        )
    for _ in range(STEPS):
        middle = (low + high) / 2
        if cost(Cut(walk, choose(middle)).compact()) > budget * whole:
            low = middle
        else:
            high = middle
    return choose(high)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def macs(walk: Walk) -> Callable[[nn.Module], int]:
    """Multiplications of one forward on the example."""
    args, kwargs = walk.example

    def count(model: nn.Module) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(*args, **kwargs)
        return counter.get_total_flops() // 2

    return count
