"""How much goes where: a share of every layer, of all together, or what a budget asks for."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sparsebit.errors import ConfigError
from sparsebit.numeric.masks import count_of
from sparsebit.sparse.channels import Walk
from sparsebit.sparse.surgery import Cut

STEPS = 12  # of the bisection: the ratio is then known to 1 / 4096
MOST = 0.99


def uniform(walk: Walk, scores: Tensor, ratio: float | Tensor, round_to: int = 1) -> Tensor:
    """The classes of least score go: the same share of every dimension, or a share per class; one stays everywhere.

    With `round_to` the number of channels that a layer keeps is a multiple of it, where the layer has as many.
    """
    _check(ratio, round_to)
    found = [torch.zeros(0, dtype=torch.long)]
    for classes in walk.dimensions():
        share = float(ratio[classes[0]]) if isinstance(ratio, Tensor) else ratio
        keep = len(classes) - count_of(len(classes), share)
        found.append(_worst(classes, scores, keep, round_to))
    return torch.cat(found)


def together(walk: Walk, scores: Tensor, ratio: float, may_go: Tensor, round_to: int = 1) -> Tensor:
    """The classes of least score go, of all dimensions in one ranking; `may_go` says which of them take part."""
    _check(ratio, round_to)
    dimensions = [classes[may_go[classes]] for classes in walk.dimensions()]
    dimensions = [classes for classes in dimensions if len(classes)]
    if not dimensions:
        return torch.zeros(0, dtype=torch.long)
    every = torch.cat(dimensions)
    worst = every[scores[every].argsort(stable=True)[: count_of(len(every), ratio)]]
    keep = [int((~torch.isin(classes, worst)).sum()) for classes in dimensions]
    return torch.cat([_worst(c, scores, k, round_to) for c, k in zip(dimensions, keep)])


def _worst(classes: Tensor, scores: Tensor, keep: int, round_to: int) -> Tensor:
    keep = min(-(-max(keep, 1) // round_to) * round_to, len(classes))
    return classes[scores[classes].argsort(stable=True)[: len(classes) - keep]]


def _check(ratio: float | Tensor, round_to: int) -> None:
    if not isinstance(ratio, Tensor) and not 0 <= ratio < 1:
        raise ConfigError(f"ratio: must be at least 0 and below 1, got {ratio}")
    if round_to < 1:
        raise ConfigError(f"round_to: must be at least 1, got {round_to}")


def within(
    walk: Walk, choose: Callable[[float], Tensor], cost: Callable[[nn.Module], float], budget: float
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


def seconds(walk: Walk, rounds: int = 7) -> Callable[[nn.Module], float]:
    """Time of one forward on the example, on this machine: the best of some rounds."""
    args, kwargs = walk.example

    def measure(model: nn.Module) -> float:
        model.eval()
        best = float("inf")
        with torch.no_grad():
            for _ in range(rounds):
                start = time.perf_counter()
                model(*args, **kwargs)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                best = min(best, time.perf_counter() - start)
        return best

    return measure


Cost = Callable[[nn.Module], float]
COSTS: dict[str, Callable[[Walk], Cost]] = {  # what a budget is of
    "macs": macs,
    "params": lambda walk: parameters,
    "latency": seconds,
}
