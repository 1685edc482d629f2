"""A wrapper's forward takes anything; whoever asks it for its signature gets that of the user's forward."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

from torch import nn

from sparsebit.graph.feeding import ANYTHING


def show_signature(model: nn.Module, known: inspect.Signature | None) -> None:
    """`inspect.signature(model.forward)` is `known`; a subclass with a signature of its own keeps that.

    Trainer of transformers keeps the columns of a dataset that the forward names.
    """
    own = list(inspect.signature(type(model).forward).parameters.values())
    if known is None or len(own) != 3 or any(p.kind not in ANYTHING for p in own[1:]):
        return

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    takes = known.replace(parameters=[own[0], *known.parameters.values()])
    forward.__signature__ = takes  # type: ignore[attr-defined]
    model.__dict__["forward"] = MethodType(forward, model)
