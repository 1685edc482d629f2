"""How far float rounding alone moves the outputs of a model: the model runs with every op's result moved a little.

Two runtimes round each op in their own way. Most outputs hardly notice; the difference of two large values does, and
so does an index of the largest of several equal scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

MOVE = 1e-6  # of each value: about eight times the rounding of a float


class OpsRoundOtherwise(TorchDispatchMode):
    """Inside, each op that computes floats gives them with relative noise of 1e-6."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _gives_memory_of_others(func):
            return result
        return pytree.tree_map_only(Tensor, self._move, result)

    def _move(self, x: Tensor) -> Tensor:
        if not x.is_floating_point() or not x.numel():
            return x
        self.seed += 1
        generator = torch.Generator(x.device).manual_seed(self.seed)
        noise = torch.empty_like(x).uniform_(-1, 1, generator=generator)
        return x * (1 + max(MOVE, torch.finfo(x.dtype).eps) * noise)


def _gives_memory_of_others(func: Any) -> bool:
    """Views and ops in place: their results must stay in the same memory."""
    return any(value.alias_info is not None for value in func._schema.returns)
