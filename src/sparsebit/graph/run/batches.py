"""Batches of the user: one after another through a model."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sparsebit.errors import CalibrationError, SparsebitError
from sparsebit.graph.run.calls import CPU, Call
from sparsebit.graph.run.progress import tracked
from sparsebit.graph.run.signature import signature_of

EMPTY = "no calibration data: `batches` is empty; a few dozen samples are enough"


def feed(model: nn.Module, batches: Any, progress: bool | None = None) -> int:
    """Forward every batch; returns how many there were."""
    device = getattr(model, "device", CPU)
    signature = signature_of(model)
    count, first = 0, ""
    with torch.no_grad():
        for batch in tracked(as_iterable(batches), progress):
            call = Call.of(batch, signature)
            first = first or str(call)
            args, kwargs = call.to(device)
            try:
                model(*args, **kwargs)
            except Exception as error:  # any error of the user's model, which goes on to the caller
                refuse_odd_batch(count, str(call), first, error)
                raise
            count += 1
    if not count:
        raise CalibrationError(EMPTY)
    return count


def refuse_odd_batch(index: int, found: str, first: str, error: Exception) -> None:
    """An error on a batch that looks unlike the first one, which ran, is the fault of the data."""
    if index and found != first and not isinstance(error, SparsebitError):
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CalibrationError(
            f"batch {index}: the model does not run on it: it is {found}, and batch 0, which ran, is {first}: {what}"
        ) from error


def as_iterable(batches: Any) -> Iterable[Any]:
    """A tensor, a mapping or a packed sequence is one batch."""
    if isinstance(batches, (Tensor, Mapping, PackedSequence)):
        return [batches]
    if not isinstance(batches, Iterable):
        raise CalibrationError(
            f"batches: expected tensors, tuples, dicts or a DataLoader, got {type(batches).__name__}"
        )
    return batches


def first_of(batches: Any) -> tuple[Any, Iterable[Any]]:
    """The first batch, and all of them: a generator runs only once, and a shuffling loader draws only once."""
    batches = as_iterable(batches)
    iterator = iter(batches)
    for first in iterator:
        return first, _Rest(first, iterator, batches)
    raise CalibrationError(EMPTY)


class _Rest(Iterable[Any]):
    """The first batch and the rest of a running iterator, with the length of the whole for a progress bar."""

    def __init__(self, first: Any, iterator: Iterator[Any], batches: Any):
        self.iterator, self.batches = itertools.chain([first], iterator), batches

    def __iter__(self) -> Iterator[Any]:
        return self.iterator

    def __length_hint__(self) -> int:
        return operator.length_hint(self.batches)
