"""Operands of a call that are the same for every input: Python numbers, and tensors that the graph reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from sparsebit.graph.simplify.fold_constants import attribute


def constant_tensor(value: Any, gm: fx.GraphModule) -> Tensor | None:
    """A number or a stored tensor, in double precision; None for everything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return torch.tensor(float(value), dtype=torch.float64)
    stored = attribute(gm, value)
    if stored is None or not stored.is_floating_point():
        return None
    return stored.detach().double()


def constant_number(value: Any, gm: fx.GraphModule) -> float | None:
    """A number, or the only entry of a stored tensor that is not trained; None for everything else."""
    stored = attribute(gm, value)
    if stored is not None and (stored.requires_grad or stored.dim() > 4):
        return None
    found = constant_tensor(value, gm)
    if found is None or found.numel() != 1:
        return None
    return float(found)
