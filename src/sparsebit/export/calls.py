"""How a model is called while it is exported: the arguments of a batch, where the model is, and eval mode."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.graph.feeding import as_call

Call = tuple[tuple[Any, ...], dict[str, Any]]


def call_of(batch: Any, signature: inspect.Signature, device: torch.device | None) -> Call:
    """A batch in any form, as the arguments of one forward, in the order of the signature, on the device."""
    args, kwargs = as_call(batch, signature)
    kwargs = {name: kwargs[name] for name in (*signature.parameters, *kwargs) if name in kwargs}
    call: Call = pytree.tree_map_only(Tensor, lambda x: x.detach().to(device), (args, kwargs))
    return call


def calls_of(batches: Any, signature: inspect.Signature, device: torch.device | None) -> list[Call]:
    one = isinstance(batches, (Tensor, Mapping))
    return [call_of(batch, signature, device) for batch in ([batches] if one else batches)]


def called(model: nn.Module, call: Call) -> Any:
    """What the model answers; on copies, because an in-place op may come first."""
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, call)
    return model(*args, **kwargs)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """eval() inside the block; every module has its own flag again afterwards."""
    training = [(m, m.training) for m in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, flag in training:
            module.training = flag
