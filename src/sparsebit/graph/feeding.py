"""Run calibration batches through a model, whatever shape they come in."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from sparsebit.errors import CalibrationError, SparsebitError

log = logging.getLogger("sparsebit")
ANYTHING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Call(NamedTuple):
    """The arguments of one forward, as they are passed."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def feed(model: nn.Module, batches: Any, progress: bool | None = None) -> int:
    """Forward every batch; returns how many there were."""
    device = getattr(model, "device", torch.device("cpu"))
    signature = signature_of(model)
    count, first = 0, ""
    with torch.no_grad():
        for batch in tracked(as_iterable(batches), progress):
            args, kwargs = as_call(batch, signature)
            first = first or looks(args, kwargs)
            try:
                model(*to_device(args, device), **to_device(kwargs, device))
            except Exception as error:
                refuse_odd_batch(count, looks(args, kwargs), first, error)
                raise
            count += 1
    if not count:
        raise CalibrationError("no calibration data: `batches` is empty; a few dozen samples are enough")
    return count


def looks(args: Any, kwargs: Mapping[str, Any]) -> str:
    """What a batch is, for messages: `float32 4x3x16x16, y=int64 4`."""

    def one(value: Any) -> str:
        if not isinstance(value, Tensor):
            return type(value).__name__
        return f"{str(value.dtype).removeprefix('torch.')} {'x'.join(map(str, value.shape)) or 'scalar'}"

    named = [f"{key}={one(value)}" for key, value in kwargs.items()]
    return ", ".join([*map(one, args), *named]) or "nothing"


def refuse_odd_batch(index: int, found: str, first: str, error: Exception) -> None:
    """An error on a batch that looks unlike the first one, which ran, is the data's."""
    if index and found != first and not isinstance(error, SparsebitError):
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CalibrationError(
            f"batch {index}: the model does not run on it: it is {found}, and batch 0, which ran, is {first}: {what}"
        ) from error


def own_call(args: Any, kwargs: Mapping[str, Any]) -> Call:
    """A copy for a forward that may write into its inputs; of a slice of a large tensor, only the slice."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    copies: dict[int, Any] = {id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in tensors}
    return Call(copy.deepcopy(tuple(args), copies), copy.deepcopy(dict(kwargs), copies))


def signature_of(model: Any) -> inspect.Signature:
    """What the forward takes; of a QuantModel or SparseModel, which take anything, what the user's forward took."""
    traced = getattr(model, "model", None)
    takes = inspect.signature(model.forward).parameters.values()
    if not isinstance(traced, fx.GraphModule) or any(p.kind not in ANYTHING for p in takes):
        traced = model
    known: inspect.Signature | None = getattr(traced, "meta", {}).get("signature")
    return known or inspect.signature(traced.forward)


def first_of(batches: Any) -> tuple[Any, Iterable[Any]]:
    """The first batch, and all of them: a generator runs only once, a shuffling loader draws only once."""
    batches = as_iterable(batches)
    iterator = iter(batches)
    for first in iterator:
        return first, _Rest(first, iterator, batches)
    raise CalibrationError("no calibration data: `batches` is empty; a few dozen samples are enough")


class _Rest(Iterable[Any]):
    def __init__(self, first: Any, iterator: Iterator[Any], batches: Any):
        self.iterator, self.batches = itertools.chain([first], iterator), batches

    def __iter__(self) -> Iterator[Any]:
        return self.iterator

    def __length_hint__(self) -> int:
        return operator.length_hint(self.batches)


def as_call(batch: Any, signature: inspect.Signature) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one forward: a mapping is keyword arguments, a tuple or list positional ones.

    A tuple longer than the forward needs, such as (x, y) of a DataLoader, is cut to the inputs; optional inputs
    go by name, in a mapping, which may have a target behind it: ({"x": x}, y). A Call stays as it is.
    """
    if isinstance(batch, Call):
        return batch
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if not isinstance(batch, (tuple, list)) or isinstance(batch, PackedSequence):
        return (batch,), {}
    if len(batch) == 2 and isinstance(batch[0], Mapping) and _takes(signature, batch[0]):
        return (), dict(batch[0])
    needed = _required(signature)
    if 0 < needed < len(batch):
        _say_what_is_left(batch, needed, signature)
        return tuple(batch[:needed]), {}
    return tuple(batch), {}


def _say_what_is_left(batch: Sequence[Any], needed: int, signature: inspect.Signature) -> None:
    """Where an optional argument could have been meant: (x, mask) looks like (x, target)."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in signature.parameters.values() if p.kind in kinds]
    if len(names) > needed:
        left = batch[needed]
        classes = isinstance(left, Tensor) and left.dim() <= 1 and not left.is_floating_point()
        _say(len(batch), needed, tuple(names), logging.INFO if classes else logging.WARNING)


@functools.cache  # once per kind of batch
def _say(size: int, needed: int, names: tuple[str, ...], level: int) -> None:
    inputs = ", ".join(f'"{name}"' for name in (*names[:needed], names[needed]))
    log.log(
        level,
        "batches: of each tuple of %d, %s is taken for the inputs (%s) and the rest for targets. If %s is meant, "
        "give mappings with the keys %s",
        size, "the first" if needed == 1 else f"the first {needed}", ", ".join(names[:needed]), names[needed], inputs,
    )  # fmt: skip


def targets_of(batch: Any, signature: inspect.Signature) -> list[Tensor]:
    """What stands in a tuple behind the inputs: the y of (x, y)."""
    if isinstance(batch, (Call, PackedSequence)) or not isinstance(batch, (tuple, list)):
        return []
    args, kwargs = as_call(batch, signature)
    behind = batch[1:] if kwargs else batch[len(args) :]
    return [value for value in behind if isinstance(value, Tensor)]


def _takes(signature: inspect.Signature, names: Mapping[Any, Any]) -> bool:
    try:
        signature.bind(**names)
    except TypeError:
        return False
    return True


def _required(signature: inspect.Signature) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in signature.parameters.values())


def as_iterable(batches: Any) -> Iterable[Any]:
    if isinstance(batches, (Tensor, Mapping, PackedSequence)):
        return [batches]  # one batch
    if not isinstance(batches, Iterable):
        raise CalibrationError(
            f"batches: expected tensors, tuples, dicts or a DataLoader, got {type(batches).__name__}"
        )
    return batches


def to_device(value: Any, device: torch.device) -> Any:
    """A packed sequence knows which of its tensors stay where they are."""

    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, (Tensor, PackedSequence)) else x  # type: ignore[arg-type]

    return pytree.tree_map(moved, value, is_leaf=lambda x: isinstance(x, PackedSequence))


def tracked(batches: Iterable[Any], progress: bool | None, label: str = "calibrating") -> Iterator[Any]:
    """A progress bar on terminals; `progress` True or False decides otherwise."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield from batches
        return
    from rich.console import Console
    from rich.progress import track

    total = operator.length_hint(batches) or None
    yield from track(batches, label, total=total, console=Console(stderr=True), transient=True)
