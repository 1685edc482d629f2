"""Calibration under torch.distributed: every rank runs its own batches, and the ranks merge what they observed.

All ranks get the same grids, those of one process with all the batches; for `moving_average`, which depends on their
order, with those of rank 0 first, then those of rank 1, and so on. Every rank must take part, also one without batches.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sparsebit.quantization.calibration.bias_correction import InputMean
from sparsebit.quantization.observers.ranks import RunningSum, world_size
from sparsebit.quantization.quantizers import Quantizer

# what an observer has beside its statistics
NOT_SEEN = {*vars(nn.Module()), "cfg", "qdesc", "backend", "params"}


def any_rank(flag: bool) -> bool:
    """Is it so on one rank at least?"""
    return any(_gather(flag, torch.device("cpu")))


@contextmanager
def over_ranks(quantizer: Quantizer) -> Iterator[None]:
    """Inside the block the quantizer has the observations of all ranks together; afterwards only those of this rank."""
    if world_size() == 1:
        yield
        return
    mine = _statistics(quantizer)
    observer = quantizer.observer
    parts = _gather(mine, quantizer.scale.device)
    try:
        _install(quantizer, parts[0])  # in the same order everywhere, so that the ranks agree to the last bit
        for seen, sums in parts[1:]:
            other = copy.copy(observer)
            vars(other).update(seen)
            observer.merge(other)
            for name, value in sums.items():
                getattr(quantizer, name).merge(value)
        yield
    finally:
        _install(quantizer, mine)


def merge_means(means: Iterable[InputMean], device: torch.device) -> None:
    """Bias correction: the mean inputs of all ranks."""
    means = list(means)
    if world_size() == 1 or not means:
        return
    first, *others = _gather([(m.sum, m.padded) for m in means], device)
    for i, mean in enumerate(means):
        mean.sum = first[i][0]
        mean.padded = any(part[i][1] for part in (first, *others))
        for part in others:
            mean.sum.merge(part[i][0])


def of_first_rank(value: Any, device: torch.device) -> Any:
    """The value of rank 0, for values that are learned and not counted."""
    return _gather(value if world_size() == 1 or torch.distributed.get_rank() == 0 else None, device)[0]


def _statistics(quantizer: Quantizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The statistics of the observer, and the sums that the quantizer itself keeps."""
    seen = {name: value for name, value in vars(quantizer.observer).items() if name not in NOT_SEEN}
    return seen, {name: value for name, value in vars(quantizer).items() if isinstance(value, RunningSum)}


def _install(quantizer: Quantizer, part: tuple[dict[str, Any], dict[str, Any]]) -> None:
    vars(quantizer.observer).update(part[0])
    vars(quantizer).update(part[1])


def _gather(value: Any, device: torch.device) -> list[Any]:
    """`value` of every rank, in the order of ranks, each a copy on `device`."""
    if world_size() == 1:
        return [value]
    buffer = io.BytesIO()
    torch.save(value, buffer)
    parts: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(parts, buffer.getvalue())
    return [torch.load(io.BytesIO(part), map_location=device, weights_only=False) for part in parts]
