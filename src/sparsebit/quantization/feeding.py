"""Run calibration batches through a model, whatever shape they come in."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import CalibrationError

log = logging.getLogger("sparsebit")


def feed(model: nn.Module, batches: Any, progress: bool | None = None) -> int:
    """Forward every batch; returns how many there were."""
    device = getattr(model, "device", torch.device("cpu"))
    forward = getattr(model, "model", model).forward
    count = 0
    with torch.no_grad():
        for batch in _tracked(_as_iterable(batches), progress):
            args, kwargs = as_call(batch, forward)
            model(*_to(args, device), **_to(kwargs, device))
            count += 1
    if not count:
        raise CalibrationError("no calibration data: `batches` is empty; a few dozen samples are enough")
    return count


def as_call(batch: Any, forward: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one forward: a mapping is keyword arguments, a tuple or list positional ones.

    A tuple longer than the forward needs, such as (x, y) of a DataLoader, is cut to the inputs; optional inputs
    go by name, in a mapping.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if not isinstance(batch, (tuple, list)):
        return (batch,), {}
    needed = _required(forward)
    return tuple(batch[:needed] if 0 < needed < len(batch) else batch), {}


def _required(forward: Any) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters.values()
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


def _as_iterable(batches: Any) -> Iterable[Any]:
    if isinstance(batches, (Tensor, Mapping)):
        return [batches]  # one batch
    if not isinstance(batches, Iterable):
        raise CalibrationError(
            f"batches: expected tensors, tuples, dicts or a DataLoader, got {type(batches).__name__}"
        )
    return batches


def _to(value: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.to(device), value)


def _tracked(batches: Iterable[Any], progress: bool | None) -> Iterator[Any]:
    """A progress bar on terminals; `progress` True or False decides otherwise."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield from batches
        return
    from rich.console import Console
    from rich.progress import track

    total = len(batches) if isinstance(batches, Sized) else None
    yield from track(batches, "calibrating", total=total, console=Console(stderr=True), transient=True)
