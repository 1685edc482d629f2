"""Ops that only move values: they are run on the labels themselves. New values (padding) get new labels."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.sparse.channel_rules import channel_rule
from sparsebit.sparse.labels import thin

if TYPE_CHECKING:
    from sparsebit.sparse.channels import Walk

SPACES = (torch, torch.Tensor, F)


def spelled(names: str) -> list[Any]:
    """Every function that torch, Tensor and F have under `names`."""
    found = (getattr(space, name, None) for name in names.split() for space in SPACES)
    return list(dict.fromkeys(op for op in found if op is not None))


MOVES = spelled(
    "view reshape flatten unflatten permute transpose t swapaxes swapdims movedim moveaxis squeeze unsqueeze expand "
    "expand_as view_as reshape_as repeat tile repeat_interleave cat concat concatenate stack hstack vstack split chunk "
    "tensor_split roll flip contiguous clone detach pixel_shuffle pixel_unshuffle channel_shuffle ravel "
    "broadcast_to narrow index_select unfold"
)
MOVING_MODULES = [
    nn.Flatten,
    nn.Unflatten,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.ChannelShuffle,
    nn.Identity,
]
MOVING_MODULES += [nn.Fold, nn.Unfold]


@channel_rule(*MOVES, *MOVING_MODULES)
def move(walk: Walk, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    if _computes(walk, node):
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.double, (args, dict(kwargs)))
    if node.op == "call_module":
        out = walk.module(node)(*args, **kwargs)
    elif node.op == "call_method":
        name = "reshape" if node.target == "view" else str(node.target)  # labels are not laid out like values
        out = getattr(args[0], name)(*args[1:], **kwargs)
    else:
        out = node.target(*args, **kwargs)  # type: ignore[operator]
    return pytree.tree_map_only(Tensor, lambda t: thin(t.long()), out)


def _computes(walk: Walk, node: fx.Node) -> bool:
    """torch has no integer form of these."""
    names = (
        str(getattr(node.target, "__name__", node.target)),
        type(walk.module(node)).__name__ if node.op == "call_module" else "",
    )
    return any(word in name.lower() for name in names for word in ("shuffle", "fold"))


@channel_rule(*spelled("unbind select"))
def take(walk: Walk, node: fx.Node, x: Tensor, dim: int = 0, *args: Any, **kwargs: Any) -> Any:
    walk.must_not_vary(node, x, dim)
    return move(walk, node, x, dim, *args, **kwargs)


@channel_rule(operator.getitem, torch.Tensor.__getitem__)
def getitem(walk: Walk, node: fx.Node, x: Any, index: Any) -> Any:
    if not isinstance(x, Tensor):
        return x[index]
    axis, parts = 0, index if isinstance(index, tuple) else (index,)
    for part in parts:
        if part is Ellipsis:
            axis = x.dim() - sum(p is not None for p in parts[parts.index(Ellipsis) + 1 :])
            continue
        if part is None:
            continue
        step = isinstance(part, slice) and part.step not in (None, 1)
        if isinstance(part, (int, list, Tensor)) or step:
            walk.must_not_vary(node, x, axis)
        if isinstance(part, Tensor) and part.dtype == torch.long:
            return NotImplemented  # an index that is computed
        axis += 1
    return thin(x[index])


@channel_rule(
    F.pad, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d
)
def pad(walk: Walk, node: fx.Node, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    if node.op == "call_module":
        pads, mode = walk.module(node).padding, "constant"
    else:
        pads = kwargs.get("pad", args[0] if args else None)
        mode = kwargs.get("mode", args[1] if len(args) > 1 else "constant")
    if mode != "constant":
        if any(input.dim() - 1 - i // 2 in walk.labels.varies(input) for i, n in enumerate(pads) if n):
            return NotImplemented
        return F.pad(input.double(), pads, mode=mode).long()
    varies = walk.labels.varies(input)
    out = _nearest(input, pads)  # a border around channels belongs to its channel
    for i in range(0, len(pads), 2):
        axis = out.dim() - 1 - i // 2
        if axis in varies and (
            pads[i] or pads[i + 1]
        ):  # new channels: they can go with what they are added to
            position = torch.arange(out.shape[axis])
            edge = (position < pads[i]) | (position >= out.shape[axis] - pads[i + 1])
            line = [-1 if d == axis else 1 for d in range(out.dim())]
            out = torch.where(edge.view(line), walk.labels.fresh(len(position)).view(line), out)
    return thin(out)


def _nearest(x: Tensor, pads: Any) -> Tensor:
    """Labels of the border: those of the nearest value inside."""
    for i in range(0, len(pads), 2):
        axis = x.dim() - 1 - i // 2
        index = torch.arange(-pads[i], x.shape[axis] + pads[i + 1]).clamp(0, x.shape[axis] - 1)
        x = x.index_select(axis, index)
    return x
