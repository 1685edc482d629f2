"""How a model is called while it is exported: the arguments of a batch, where the model is, and eval mode."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsebit.errors import ExportError
from sparsebit.graph.run.calls import Call, targets_of


def call_of(batch: Any, signature: inspect.Signature, device: torch.device | None) -> Call:
    """A batch in any form, as the arguments of one forward, in the order of the signature, on the device."""
    return Call.of(batch, signature).in_order_of(signature).map(Tensor.detach).to(device)


def as_batches(batches: Any) -> list[Any]:
    """All batches, also of a loader that runs only once; a tensor or a mapping is one batch."""
    if isinstance(batches, (Tensor, Mapping)):
        return [batches]
    return list(batches)


def calls_of(batches: Any, signature: inspect.Signature, device: torch.device | None) -> list[Call]:
    return [call_of(batch, signature, device) for batch in as_batches(batches)]


def target_shapes(batches: list[Any], signature: inspect.Signature) -> list[tuple[int, ...]]:
    """The shapes of the labels in batches such as (x, y), without the axis of the batch, each once."""
    found = []
    for batch in batches:
        for target in targets_of(batch, signature):
            if target.dim() and not target.is_floating_point():
                found.append(tuple(target.shape[1:]))
    return list(dict.fromkeys(found))


def some_calls_of(batches: Any, signature: inspect.Signature, device: torch.device | None) -> list[Call]:
    """The calls of `batches`; an error if there are none, because a comparison of nothing would count as agreement."""
    calls = calls_of(batches, signature, device)
    tensors = [t for t in pytree.tree_leaves(calls) if isinstance(t, Tensor)]
    if not any(t.numel() for t in tensors):
        raise ExportError("batches: are empty, so there is nothing to compare; give at least one")
    return calls
