"""Models in half precision: onnxruntime has no integer kernels around float16, and computes nothing in bfloat16.

So their files compute in float32, which holds every value of both.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

HALF = (torch.float16, torch.bfloat16)


def half_type(model: nn.Module, kinds: tuple[torch.dtype, ...] = HALF) -> torch.dtype | None:
    """The first half-precision type that the model has."""
    tensors = (*model.parameters(), *model.buffers())
    return next((tensor.dtype for tensor in tensors if tensor.dtype in kinds), None)


def float_copy(model: Any) -> Any:
    """A copy of the model in float32; on the CPU the memory of one more model."""
    return copy.deepcopy(model).float()


def in_float(value: Any) -> Any:
    """A batch, or several, with tensors of half precision as float32."""
    return pytree.tree_map_only(Tensor, lambda x: x.float() if x.dtype in HALF else x, value)


def note_of(kind: torch.dtype) -> str:
    """The note in the report."""
    name = str(kind).removeprefix("torch.")
    return f"the model is {name}: the file computes in float32, takes float32 inputs, and was compared in float32"
