"""Batches: the arguments of each, on the model's device; one that does not fit is named by its number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import CalibrationError, ConfigError, SparsebitError
from sparsebit.graph.feeding import as_call, as_iterable, own_call, signature_of, to_device, tracked
from sparsebit.graph.training import evaluating
from sparsebit.sparse.trace.running import Call, leaves


class Batches:
    """Calls of `model`, as often as they are wanted; a generator is enough where they are wanted `once`."""

    def __init__(self, model: nn.Module, batches: Any, progress: bool | None, what: str, once: bool = False):
        if isinstance(batches, Iterator) and not once:
            raise ConfigError(
                f"{what}: batches are read several times; pass a list or a loader, not a generator"
            )
        self.model, self.batches, self.signature = model, as_iterable(batches), signature_of(model)
        self.progress, self.what = progress, what
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.number, self.batch = 0, None  # the one in use, from 1 on, with what is behind its inputs

    def __iter__(self) -> Iterator[Call]:
        number = 0
        for number, batch in enumerate(tracked(self.batches, self.progress, self.what), 1):
            call = self._call(number, batch)
            self.number, self.batch = number, batch
            yield call
            self.number, self.batch = 0, None
        if not number:
            raise CalibrationError("no data: `batches` is empty; a few dozen samples are enough")

    def first(self, samples: int) -> Iterator[Call]:
        """No more of them than hold so many samples."""
        seen, calls = 0, iter(self)
        while seen < samples and (call := next(calls, None)) is not None:
            yield call
            seen += max(
                (len(x) for x in pytree.tree_leaves(call) if isinstance(x, Tensor) and x.dim()), default=1
            )
        self.number, self.batch = 0, None

    def _call(self, number: int, batch: Any) -> Call:
        if batch is None:
            raise CalibrationError(f"batches: batch {number} is None; give inputs, as the example has them")
        args, kwargs = as_call(batch, self.signature)
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise CalibrationError(
                f"batches: do not fit forward{self.signature}: {error} (batch {number}); give inputs, "
                f"(inputs, target), a dict of keyword arguments, or (that dict, target)"
            ) from None
        refuse_arrays(f"batches: batch {number}", (args, kwargs))
        call = to_device(args, self.device), to_device(kwargs, self.device)
        for leaf in leaves(call):
            bad = _bad(leaf)
            if bad and not self._copes_with(call):
                raise CalibrationError(
                    f"batches: batch {number} has NaN or Inf, {bad} of {leaf.numel()} values; leave it out"
                )
        return call

    def _copes_with(self, call: Call) -> bool:
        """Models may do something about such values themselves."""
        with evaluating(self.model), torch.no_grad():
            args, kwargs = own_call(*call)
            return not any(map(_bad, leaves(self.model(*args, **kwargs))))

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """An error while a batch is in use says which one it was."""
        try:
            yield
        except (SparsebitError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not self.number:
                raise
            form = "inputs as the example has them"
            if isinstance(self.batch, (tuple, list)) and isinstance(self.batch[0], (tuple, list)):
                form = "(first, second, target), or a dict of inputs and the target: ({...}, target)"
            raise CalibrationError(
                f"batches: the model does not run on batch {self.number}: {in_short(error)}; give {form}"
            ) from error


def _bad(x: Any) -> int:
    """How many values no sum can take; -inf is what masks of attention have."""
    floats = isinstance(x, Tensor) and x.is_floating_point()
    return int((x.isnan() | x.isposinf()).sum()) if floats else 0


def in_short(error: Exception) -> str:
    """Its type and first line: a graph says more of where it was."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].rstrip('.')}"


def refuse_arrays(where: str, value: Any) -> None:
    if any(isinstance(leaf, np.ndarray) for leaf in pytree.tree_leaves(value)):
        raise SparsebitError(f"{where}: is a numpy array; pass a tensor: torch.from_numpy(array)")
