"""merge_branches: parallel convolutions of one value that are only added become one convolution (RepVGG, MobileOne).

Convolution is linear: conv(x, a) + conv(x, b) = conv(x, a + b), where the smaller kernel is padded with zeros.
A batch norm behind a convolution scales its weight. A batch norm of x itself is a 1x1 kernel on the diagonal.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.graph.ops import module_calls, module_of, op_of
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.rewrite import fresh_name
from sparsebit.graph.trace.tracer import forward_owner

ADDS = (operator.add, torch.add, torch.Tensor.add)
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.modules.batchnorm._BatchNorm,)  # the class that has the forward of all three


@dataclass
class Branch:
    """One summand: a convolution of `x` with its batch norm, or (`conv` is None) a batch norm of `x`."""

    end: fx.Node
    x: fx.Node
    conv: nn.Module | None
    norm: nn.Module | None
    path: str

    def scale_and_shift(self) -> tuple[Tensor, Tensor] | None:
        """The factor and the summand of the norm for each channel, in double precision."""
        norm: Any = self.norm
        if norm is None:
            return None
        variance = norm.running_var.double()
        scale = torch.rsqrt(variance + norm.eps)
        shift = -norm.running_mean.double() * scale
        if norm.affine:
            weight = norm.weight.detach().double()
            scale = scale * weight
            shift = shift * weight + norm.bias.detach().double()
        return scale, shift


@graph_pass(
    "merge_branches",
    when=lambda cfg: cfg.schedule.fuse_bn and cfg.schedule.enabled("merge_branches"),
    keeps_output=True,
)
def merge_branches(gm: fx.GraphModule, ctx: Any) -> int:
    merged = 0
    calls = module_calls(gm)
    for node in reversed(list(gm.graph.nodes)):  # the last addition of a sum comes first
        if not _is_add(node, gm):
            continue
        families: dict[Any, list[Branch]] = defaultdict(list)
        for branch in _branches(node, gm, calls):
            families[branch.x].append(branch)
        for branches in families.values():
            merged += _merge(node, branches, gm)
    return merged


def _is_add(node: fx.Node, gm: fx.GraphModule) -> bool:
    plain = len(node.args) == 2 and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args)
    return node.op in ("call_function", "call_method") and plain and op_of(node, gm) in ADDS


def _branches(add: fx.Node, gm: fx.GraphModule, calls: Any) -> Iterator[Branch]:
    """The summands of a sum that are convolutions or batch norms, each read by this sum alone."""
    for summand in add.all_input_nodes:
        if len(summand.users) > 1 or add.args[0] is add.args[1]:
            continue
        if _is_add(summand, gm):
            yield from _branches(summand, gm, calls)
            continue
        norm = _layer(summand, gm, calls, NORMS)
        below = _input(summand) if norm is not None else summand
        if norm is not None and not _is_settled(norm):
            continue
        if below is None or (norm is not None and len(below.users) > 1):
            conv = None
        else:
            conv = _layer(below, gm, calls, CONVS)
        x = below if conv is None else _input(below)  # type: ignore[arg-type]
        if x is not None and (conv is not None or norm is not None):
            path = str((below if conv is not None else summand).meta.get("path", summand.name))  # type: ignore[union-attr]
            yield Branch(summand, x, conv, norm, path)


def _layer(node: fx.Node, gm: fx.GraphModule, calls: Any, kinds: tuple[type, ...]) -> nn.Module | None:
    """The layer that a node calls, if it is one of `kinds` with their own forward, called once."""
    if node.op != "call_module" or calls[str(node.target)] > 1 or _input(node) is None:
        return None
    module = module_of(node, gm)
    hooked = module._forward_hooks or module._forward_pre_hooks
    if forward_owner(type(module)) in kinds and not hooked:
        return module
    return None


def _input(node: fx.Node) -> fx.Node | None:
    found = node.all_input_nodes
    if len(found) == 1 and node.args == (found[0],):
        return found[0]
    return None


def _is_settled(norm: Any) -> bool:
    """Does it compute with statistics that do not change?"""
    return not norm.training and norm.running_mean is not None


def _merge(add: fx.Node, branches: list[Branch], gm: fx.GraphModule) -> int:
    """Put one convolution in the place of all branches that fit the first one; returns how many it replaced."""
    first = max(
        (b for b in branches if b.conv is not None),
        key=lambda b: b.conv.weight[0, 0].numel(),  # type: ignore[union-attr,index]
        default=None,
    )
    fitting = [b for b in branches if first is not None and _fits(b, first.conv)]
    if first is None or len(fitting) < 2:
        return 0
    weights, biases = zip(*(_kernel(branch, first.conv) for branch in fitting))
    made = _like(first.conv, sum(weights), sum(biases))
    name = fresh_name(gm, f"{add.name}_merged")
    gm.add_submodule(name, made)
    with gm.graph.inserting_before(fitting[0].end):
        call = gm.graph.call_module(name, (first.x,))
    call.meta = {**first.end.meta, "path": first.path}
    for branch in fitting[1:]:
        _drop_summand(branch.end)
    fitting[0].end.replace_all_uses_with(call)
    return len(fitting)


def _drop_summand(end: fx.Node) -> None:
    """The sum that reads `end` is its other summand now."""
    (add,) = end.users
    other = next(a for a in add.args if a is not end)
    assert isinstance(other, fx.Node)
    add.replace_all_uses_with(other)
    add.args = (other, other)  # it has no reader: it is removed as dead code, and no longer reads `end`


def _fits(branch: Branch, into: Any) -> bool:
    """Can its kernel be added to that of `into`?"""
    if into.padding_mode != "zeros" or isinstance(into.padding, str) or any(d != 1 for d in into.dilation):
        return False
    margins = [k - 2 * p for k, p in zip(into.kernel_size, into.padding)]
    conv: Any = branch.conv
    if conv is None:
        channels = branch.norm.num_features  # type: ignore[union-attr]
        same = into.in_channels == into.out_channels == channels
        return same and all(s == 1 for s in into.stride) and all(m == 1 for m in margins)
    if isinstance(conv.padding, str) or conv.padding_mode != "zeros" or any(d != 1 for d in conv.dilation):
        return False
    keys = ("stride", "groups", "in_channels", "out_channels")
    same = all(getattr(conv, key) == getattr(into, key) for key in keys)
    return same and [k - 2 * p for k, p in zip(conv.kernel_size, conv.padding)] == margins


def _kernel(branch: Branch, into: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias of a branch as a convolution of the shape of `into`, in double precision."""
    conv: Any = branch.conv
    if conv is None:
        per_group = into.in_channels // into.groups
        weight = torch.zeros(into.out_channels, per_group, *[1] * len(into.kernel_size), dtype=torch.float64)
        weight = weight.to(into.weight.device)
        rows = torch.arange(into.out_channels)
        weight.flatten(1)[rows, rows % per_group] = 1.0
        bias = weight.new_zeros(into.out_channels)
    else:
        weight = conv.weight.detach().double()
        if conv.bias is None:
            bias = weight.new_zeros(len(weight))
        else:
            bias = conv.bias.detach().double()
    found = branch.scale_and_shift()
    if found is not None:
        scale, shift = found
        weight = weight * scale.view(-1, *[1] * (weight.dim() - 1))
        bias = bias * scale + shift
    pads = [(large - small) // 2 for large, small in zip(into.kernel_size, weight.shape[2:])]
    return F.pad(weight, [p for pad in reversed(pads) for p in (pad, pad)]), bias


def _like(conv: Any, weight: Tensor, bias: Tensor) -> nn.Module:
    made = forward_owner(type(conv))(
        conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, groups=conv.groups
    )
    made = made.to(conv.weight)
    made.weight.data.copy_(weight)
    made.bias.data.copy_(bias)
    made.weight.requires_grad = conv.weight.requires_grad
    made.training = conv.training
    return made
