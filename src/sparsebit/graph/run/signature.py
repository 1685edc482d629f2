"""The signature of the user's forward, also behind wrappers that take any arguments."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

from torch import fx, nn

ANYTHING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def signature_of(model: Any) -> inspect.Signature:
    """The inputs of the forward. A QuantModel or SparseModel takes any; there the user's forward decides."""
    traced = getattr(model, "model", None)
    takes = inspect.signature(model.forward).parameters.values()
    if not isinstance(traced, fx.GraphModule) or any(p.kind not in ANYTHING for p in takes):
        traced = model
    known: inspect.Signature | None = getattr(traced, "meta", {}).get("signature")
    return known or inspect.signature(traced.forward)


def show_signature(model: nn.Module, known: inspect.Signature | None) -> None:
    """Let `inspect.signature(model.forward)` return `known`. A subclass with another signature keeps it.

    Trainer of transformers removes the columns of a dataset that the forward does not name.
    """
    own = list(inspect.signature(type(model).forward).parameters.values())
    if known is None or len(own) != 3 or any(p.kind not in ANYTHING for p in own[1:]):
        return

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    takes = known.replace(parameters=[own[0], *known.parameters.values()])
    forward.__signature__ = takes  # type: ignore[attr-defined]
    model.__dict__["forward"] = MethodType(forward, model)
