"""Operands of one type: what torch casts inside its kernels is cast in the graph, before torch's exporter sees it.

torch's exporter adds these casts itself, but only after it has rewritten the ops. A number may stand in the place of a
tensor by then (1.0 - mask, 7 // length), which it refuses, and a power keeps operands of two types, which is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Arithmetic = Callable[..., Tensor]
OPS: dict[str, Arithmetic] = {
    "sub": torch.sub,
    "floor_divide": torch.floor_divide,
    "__floordiv__": torch.floor_divide,
    "pow": torch.pow,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
}
SWAPPED: dict[str, Arithmetic] = {  # the tensor comes first, and is the right operand
    "rsub": torch.sub,
    "__rsub__": torch.sub,
    "__rfloordiv__": torch.floor_divide,
    "__rpow__": torch.pow,
    "__rmod__": torch.remainder,
}


class CommonType(TorchFunctionMode):
    """Inside the block, operands of different types are cast to the type of the result before the op."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]  # rsub.Scalar is an rsub
        if len(args) == 2 and name in OPS:
            left, right, op = *args, OPS[name]
        elif len(args) == 2 and name in SWAPPED:
            right, left, op = *args, SWAPPED[name]
        else:
            return func(*args, **kwargs)
        kind = torch.result_type(left, right)
        if _fits(left, kind) and _fits(right, kind) and (isinstance(left, Tensor) or op is torch.sub):
            return func(*args, **kwargs)
        device = next(value.device for value in args if isinstance(value, Tensor))
        return op(_as_tensor(left, kind, device), _as_tensor(right, kind, device), **kwargs)


def _fits(value: Any, kind: torch.dtype) -> bool:
    return not isinstance(value, Tensor) or value.dtype == kind


def _as_tensor(value: Any, kind: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(kind)
    return torch.full((), value, dtype=kind, device=device)
