"""Legacy: functions that move or detach every tensor of a nested value."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def to_device(data: Any, device: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.to(device), data)


def to_cpu(data: Any) -> Any:
    return to_device(data, "cpu")


def to_detach(data: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.detach(), data)
