"""Operands of one type: what torch casts inside its kernels is cast in the graph, before torch's exporter sees it.

torch's exporter adds these casts itself, but only after it has rewritten the ops, and number by number. Then a number
stands in the place of a tensor (1.0 - mask, 7 // length), or beside one (x.clamp(0, 0.5)), which it refuses. A power of
two types keeps both, which is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Arithmetic = Callable[..., Tensor]
OPS: dict[str, Arithmetic] = {
    "sub": torch.sub,
    "floor_divide": torch.floor_divide,
    "__floordiv__": torch.floor_divide,
    "pow": torch.pow,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
}
SWAPPED: dict[str, Arithmetic] = {  # the right operand comes first in the call
    "rsub": torch.sub,
    "__rsub__": torch.sub,
    "__rfloordiv__": torch.floor_divide,
    "__rpow__": torch.pow,
    "__rmod__": torch.remainder,
}
CLAMPS = ("clamp", "clip", "clamp_", "clip_")


class CommonType(TorchFunctionMode):
    """Inside the block, operands of different types are cast to the type of the result before the op."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]  # rsub.Scalar is an rsub
        if name in CLAMPS and {int, float} <= {type(value) for value in (*args, *kwargs.values())}:
            args, kwargs = pytree.tree_map_only(int, float, (args, kwargs))
        if len(args) != 2 or (name not in OPS and name not in SWAPPED):
            return func(*args, **kwargs)
        op = OPS.get(name) or SWAPPED[name]
        left, right = args if name in OPS else reversed(args)
        kind = torch.result_type(left, right)
        one_type = all(not isinstance(value, Tensor) or value.dtype == kind for value in args)
        if one_type and (isinstance(left, Tensor) or op is torch.sub):
            return func(*args, **kwargs)
        device = next(value.device for value in args if isinstance(value, Tensor))
        return op(_as_tensor(left, kind, device), _as_tensor(right, kind, device), **kwargs)


def _as_tensor(value: Any, kind: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(kind)
    return torch.full((), value, dtype=kind, device=device)
