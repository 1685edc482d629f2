"""Ops that only move values: they run on the labels themselves. New values (padding) get new labels."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from sparsebit.sparse.labels.labels import thin
from sparsebit.sparse.labels.rules import channel_rule

if TYPE_CHECKING:
    from sparsebit.sparse.labels.walk import Walk

SPACES = (torch, torch.Tensor, F)


def spelled(names: str) -> list[Any]:
    """Every function that torch, Tensor and F have under `names`."""
    found = (getattr(space, name, None) for name in names.split() for space in SPACES)
    return list(dict.fromkeys(op for op in found if op is not None))


MOVES = spelled(
    "view reshape flatten unflatten permute transpose t swapaxes swapdims movedim moveaxis squeeze unsqueeze expand "
    "expand_as view_as reshape_as repeat tile hstack vstack split chunk "
    "tensor_split flip contiguous clone detach ravel broadcast_to narrow"
)
MOVING_MODULES = [nn.Flatten, nn.Unflatten, nn.Identity]


@channel_rule(*MOVES, *MOVING_MODULES)
def move(walk: Walk, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    if node.op == "call_module":
        out = walk.module(node)(*args, **kwargs)
    elif node.op == "call_method":
        # the memory layout of labels differs from that of values
        if node.target == "view":
            name = "reshape"
        else:
            name = str(node.target)
        out = getattr(args[0], name)(*args[1:], **kwargs)
    else:
        out = node.target(*args, **kwargs)  # type: ignore[operator]
    return pytree.tree_map_only(Tensor, lambda t: thin(t.long()), out)


@channel_rule(getattr)
def attribute(walk: Walk, node: fx.Node, x: Any, name: str) -> Any:
    if isinstance(x, PackedSequence) and name in x._fields:
        return getattr(x, name)
    if isinstance(x, tuple) and name in ("values", "indices"):  # the fields of max, min and others
        return x[name == "indices"]
    if isinstance(x, Tensor) and name in ("mT", "T", "data"):
        return thin(getattr(x, name))
    return NotImplemented


@channel_rule(*spelled("cat concat concatenate stack"))
def cat(walk: Walk, node: fx.Node, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    """A join of tokens has the same channels; a join along channels has the channels of all."""
    out = move(walk, node, tensors, dim, **kwargs)
    axis = kwargs.get("axis", dim) % out.dim()
    if out.dim() == tensors[0].dim():
        parts = tensors
    else:
        parts = [out.narrow(axis, 0, 1)]
    if not any(axis in walk.labels.varies(part) for part in parts) and any(map(walk.labels.varies, parts)):
        walk.labels.whole(out, [axis])
    return out


@channel_rule(*spelled("unbind select"))
def take(walk: Walk, node: fx.Node, x: Tensor, dim: int = 0, *args: Any, **kwargs: Any) -> Any:
    walk.must_not_vary(node, x, dim)
    return move(walk, node, x, dim, *args, **kwargs)


@channel_rule(operator.getitem, torch.Tensor.__getitem__)
def getitem(walk: Walk, node: fx.Node, x: Any, index: Any) -> Any:
    if not isinstance(x, Tensor):
        return x[index]
    if any(isinstance(part, Tensor) and walk.labels.varies(part) for part in pytree.tree_leaves(index)):
        return NotImplemented
    index = fx.map_arg(node.args[1], lambda n: walk.values[n])  # the positions themselves, not their labels
    axis = 0
    parts = index if isinstance(index, tuple) else (index,)
    for i, part in enumerate(parts):
        if part is Ellipsis:
            axis = x.dim() - sum(axes_of(p) for p in parts[i + 1 :])
            continue
        step = isinstance(part, slice) and part.step not in (None, 1)
        if isinstance(part, (int, list, Tensor)) or step:
            for taken in range(axis, axis + axes_of(part)):
                walk.must_not_vary(node, x, taken)
        axis += axes_of(part)
    return thin(x[index])


def axes_of(part: Any) -> int:
    """The number of axes of the source that one part of an index stands for."""
    if part is None:
        return 0
    if isinstance(part, Tensor) and part.dtype == torch.bool:
        return part.dim()
    return 1


@channel_rule(*spelled("index_select"))
def index_select(walk: Walk, node: fx.Node, x: Tensor, dim: int, index: Any) -> Any:
    if len(node.args) > 2:
        positions = node.args[2]
    else:
        positions = node.kwargs["index"]
    if walk.labels.varies(index) or not isinstance(positions, fx.Node):
        return NotImplemented
    walk.must_not_vary(node, x, dim)
    return thin(x.index_select(dim, walk.values[positions]))


@channel_rule(*spelled("roll"), torch.Tensor.unfold)
def shift(walk: Walk, node: fx.Node, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Positions move by a fixed number, so the axis may hold no channels."""
    dims = kwargs.get("dims", kwargs.get("dimension", args[-1 if len(args) < 3 else 0] if args else None))
    if isinstance(dims, int):
        dims = [dims]
    if dims is None or {d % x.dim() for d in dims} & {*walk.labels.varies(x)}:
        return NotImplemented
    return move(walk, node, x, *args, **kwargs)


@channel_rule(*spelled("repeat_interleave"))
def repeat_interleave(walk: Walk, node: fx.Node, x: Tensor, repeats: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(repeats, int):
        return NotImplemented
    return move(walk, node, x, repeats, *args, **kwargs)


@channel_rule(*spelled("channel_shuffle"), nn.ChannelShuffle)
def channel_shuffle(walk: Walk, node: fx.Node, input: Tensor, groups: int = 0) -> Any:
    """Groups stay equally large: the same position of every group is removed."""
    groups = groups or walk.module(node).groups
    labels = walk.labels.along(input, 1).view(groups, -1)
    walk.labels.join(labels, labels[:1])
    return walk.spread(node, labels.t().reshape(-1), 1)


@channel_rule(F.unfold, nn.Unfold, *spelled("pixel_unshuffle"), nn.PixelUnshuffle)
def windows(walk: Walk, node: fx.Node, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Every position of a window is a channel, which depends on its source channel."""
    if input.dim() != 4:
        return NotImplemented  # an input without a batch
    labels = walk.labels.along(input, 1)
    out = walk.values[node]
    return walk.spread(node, labels.repeat_interleave(out.shape[1] // len(labels)), 1)


@channel_rule(F.fold, nn.Fold, *spelled("pixel_shuffle"), nn.PixelShuffle)
def unite(walk: Walk, node: fx.Node, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The positions of a window become one channel."""
    if walk.values[node].dim() != 4:
        return NotImplemented  # an input without a batch
    parts = walk.labels.along(input, 1).view(walk.values[node].shape[1], -1)
    walk.labels.whole(parts, [1])
    return walk.spread(node, parts[:, 0], 1)


@channel_rule(
    F.pad, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d
)
def pad(walk: Walk, node: fx.Node, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    if node.op == "call_module":
        pads = walk.module(node).padding
        mode = "constant"
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
        # new channels: they may be removed together with the channels that they are added to
        if axis in varies and (pads[i] or pads[i + 1]):
            position = torch.arange(out.shape[axis])
            edge = (position < pads[i]) | (position >= out.shape[axis] - pads[i + 1])
            line = []
            for d in range(out.dim()):
                line.append(-1 if d == axis else 1)
            out = torch.where(edge.view(line), walk.labels.fresh(len(position)).view(line), out)
    return thin(out)


def _nearest(x: Tensor, pads: Any) -> Tensor:
    """Labels of the border: those of the nearest value inside."""
    for i in range(0, len(pads), 2):
        axis = x.dim() - 1 - i // 2
        index = torch.arange(-pads[i], x.shape[axis] + pads[i + 1]).clamp(0, x.shape[axis] - 1)
        x = x.index_select(axis, index)
    return x
