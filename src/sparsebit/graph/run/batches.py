"""Batches of the user: their forms, and their way through a model, one after another."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from sparsebit.errors import CalibrationError, ConfigError, SparsebitError
from sparsebit.graph.run.calls import CPU, Call, device_of
from sparsebit.graph.run.compare import leaves
from sparsebit.graph.run.modes import evaluating
from sparsebit.graph.run.signature import signature_of
from sparsebit.utils.progress import tracked

EMPTY = "no calibration data: `batches` is empty; a few dozen samples are enough"


def feed(model: nn.Module, batches: Any, progress: bool | None = None) -> int:
    """Run the model on every batch; returns the number of batches."""
    device = getattr(model, "device", CPU)
    signature = signature_of(model)
    count = 0
    first = ""
    with torch.no_grad():
        for batch in tracked(as_iterable(batches), progress):
            call = Call.of(batch, signature)
            first = first or str(call)
            args, kwargs = call.to(device)
            try:
                model(*args, **kwargs)
            except Exception as error:  # any error of the user's model; the caller gets it
                refuse_odd_batch(count, str(call), first, error)
                raise
            count += 1
    if not count:
        raise CalibrationError(EMPTY)
    return count


def refuse_odd_batch(index: int, found: str, first: str, error: Exception) -> None:
    """Blame the data if the model failed on a batch that looks unlike the first one, which ran."""
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
        self.iterator = itertools.chain([first], iterator)
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self.iterator

    def __length_hint__(self) -> int:
        return operator.length_hint(self.batches)


class Batches:
    """The user's batches as calls of `model`, on its device; every batch is checked before it is used.

    model     decides by the signature of its forward which values of a batch are inputs.
    batches   are read on every iteration.
    label     names the work in the progress bar and in errors.
    once      the batches are read only once, so a generator is enough.
    """

    def __init__(self, model: nn.Module, batches: Any, progress: bool | None, label: str, once: bool = False):
        if isinstance(batches, Iterator) and not once:
            raise ConfigError(
                f"{label}: batches are read several times; pass a list or a loader, not a generator"
            )
        self.model = model
        self.batches = as_iterable(batches)
        self.signature = signature_of(model)
        self.progress = progress
        self.label = label
        self.device = device_of(model) or CPU
        self.number = 0  # of the batch in use, from 1 on; 0 between batches
        self.batch: Any = None  # the batch in use as the user gave it, with its target

    def __iter__(self) -> Iterator[Call]:
        number = 0
        for number, batch in enumerate(tracked(self.batches, self.progress, self.label), 1):
            call = self._call(number, batch)
            self.number = number
            self.batch = batch
            yield call
            self._leave()
        if not number:
            raise CalibrationError(EMPTY)

    def first(self, samples: int) -> Iterator[Call]:
        """The first batches, until they hold so many samples."""
        seen = 0
        calls = iter(self)
        while seen < samples and (call := next(calls, None)) is not None:
            yield call
            seen += call.samples()
        self._leave()

    def _leave(self) -> None:
        self.number = 0
        self.batch = None

    def _call(self, number: int, batch: Any) -> Call:
        if batch is None:
            raise CalibrationError(f"batches: batch {number} is None; give inputs, as the example has them")
        call = Call.of(batch, self.signature)
        try:
            self.signature.bind(*call.args, **call.kwargs)
        except TypeError as error:
            raise CalibrationError(
                f"batches: do not fit forward{self.signature}: {error} (batch {number}); give inputs, "
                f"(inputs, target), a dict of keyword arguments, or (that dict, target)"
            ) from None
        refuse_arrays(f"batches: batch {number}", call)
        call = call.to(self.device)
        for leaf in leaves(call):
            bad = _count_bad(leaf)
            if bad and not self._copes_with(call):
                raise CalibrationError(
                    f"batches: batch {number} has NaN or Inf, {bad} of {leaf.numel()} values; leave it out"
                )
        return call

    def _copes_with(self, call: Call) -> bool:
        """Is the output finite anyway? Some models replace such values themselves."""
        with evaluating(self.model), torch.no_grad():
            return not any(map(_count_bad, leaves(call.run(self.model))))

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Inside, an error names the batch that was in use."""
        try:
            yield
        except (SparsebitError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any error of the user's model; the caller gets it
            if not self.number:
                raise
            form = "inputs as the example has them"
            if isinstance(self.batch, (tuple, list)) and isinstance(self.batch[0], (tuple, list)):
                form = "(first, second, target), or a dict of inputs and the target: ({...}, target)"
            raise CalibrationError(
                f"batches: the model does not run on batch {self.number}: {in_short(error)}; give {form}"
            ) from error


def refuse_arrays(where: str, value: Any) -> None:
    if any(isinstance(leaf, np.ndarray) for leaf in pytree.tree_leaves(value)):
        raise SparsebitError(f"{where}: is a numpy array; pass a tensor: torch.from_numpy(array)")


def in_short(error: Exception) -> str:
    """The type and the first line of an error; an error inside a graph has many more lines."""
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line.rstrip('.')}"


def _count_bad(x: Any) -> int:
    """Count the values that are NaN or +Inf. A mask of attention may hold -Inf."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return 0
    return int((x.isnan() | x.isposinf()).sum())
