"""fuse_bn: fold a BatchNorm into the convolution or linear layer before it.

w' = w * gamma / sqrt(var + eps)        b' = (b - mean) * gamma / sqrt(var + eps) + beta
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.graph.ops import called_module
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.pattern import Match, Pat, Rule
from sparsebit.quantization.converters.fuse_operations.disable_unnecessary_quant import CLIPS, SMOOTH
from sparsebit.quantization.converters.utils.pass_pattern import PassPattern
from sparsebit.quantization.modules.activations import QGELU
from sparsebit.quantization.modules.base import QuantOpr
from sparsebit.quantization.modules.conv import (
    QConv1d,
    QConv2d,
    QConv3d,
    QConvTranspose1d,
    QConvTranspose2d,
    QConvTranspose3d,
)
from sparsebit.quantization.modules.linear import QLinear
from sparsebit.quantization.modules.normalization import (
    QBatchNorm1d,
    QBatchNorm2d,
    QBatchNorm3d,
    QSyncBatchNorm,
)
from sparsebit.quantization.modules.shape import Flatten, Reshape
from sparsebit.quantization.modules.unary import Dropout

LAYERS: dict[type[nn.Module], tuple[Any, ...]] = {  # the layer that each BatchNorm can be folded into
    QBatchNorm1d: (QConv1d, QConvTranspose1d, QLinear),
    QBatchNorm2d: (QConv2d, QConvTranspose2d),
    QBatchNorm3d: (QConv3d, QConvTranspose3d),
    QSyncBatchNorm: (QConv1d, QConv2d, QConv3d, QConvTranspose1d, QConvTranspose2d, QConvTranspose3d),
}


@graph_pass(
    "fuse_bn", when=lambda cfg: cfg.schedule.fuse_bn and not cfg.schedule.bn_tuning, keeps_output=True
)
def fuse_bn(gm: fx.GraphModule, ctx: Any) -> int:
    def fold(m: Match) -> fx.Node | None:
        conv = m.module("conv")
        bn = m.module("bn")
        norms = _always_together(m["conv"], m["bn"], gm)
        if norms is None:
            return m.decline("the layer or the BatchNorm is also called without the other")
        if bn.running_var is None:
            return m.decline("the BatchNorm has no running statistics (track_running_stats=False)")
        if isinstance(conv, QLinear) and rank_of(m["conv"], gm) != 2:
            return m.decline("the linear layer may have tokens: their axis is the BatchNorm's channel axis")
        if conv.weight.shape[conv.weight_axis] * (conv.groups if conv.weight_axis else 1) != bn.num_features:
            return m.decline("the BatchNorm does not work on the layer's channels")
        fold_into(conv, bn)
        for norm in norms:  # the other calls of the same pair
            norm.replace_all_uses_with(norm.all_input_nodes[0])
            norm.args = ()  # it is not a reader any more; dead code is removed at the end of the pass
        gm.__dict__[f"{m['conv'].name}_bn"] = conv  # the original's name for a folded layer
        return m["conv"]

    rules = (
        Rule("fuse_bn", Pat(bn, Pat(layers, name="conv"), name="bn"), fold) for bn, layers in LAYERS.items()
    )
    return sum(rule.apply(gm) for rule in rules)


def _always_together(conv: fx.Node, bn: fx.Node, gm: fx.GraphModule) -> list[fx.Node] | None:
    """The other calls of this BatchNorm, if each call of the layer has one reader, which is a call of it; else None."""
    layers = [n for n in gm.graph.nodes if n.op == "call_module" and n.target == conv.target]
    norms = [n for n in gm.graph.nodes if n.op == "call_module" and n.target == bn.target]
    pairs = [(layer, *layer.users) for layer in layers]
    if sorted(pairs) != sorted((norm.all_input_nodes[0], norm) for norm in norms if norm.all_input_nodes):
        return None
    return [norm for norm in norms if norm is not bn]


class ReplacePattern(PassPattern):
    """Legacy: fuse_bn as a class."""

    graph_pass = fuse_bn


def rank_of(node: fx.Node, gm: fx.GraphModule) -> int | None:
    """The number of dimensions of the value of `node`, if an example or the ops before it show it; otherwise None."""
    known = node.meta.get("tensor_meta", node.meta.get("val"))
    if known is not None and hasattr(known, "shape"):
        return len(known.shape)
    module = called_module(node, gm)
    if isinstance(module, Flatten):
        return 2 if _flattened(node, module) == (1, -1) else None
    if isinstance(module, Reshape):
        sizes = node.args[1] if len(node.args) == 2 else node.args[1:]
        if isinstance(sizes, (tuple, list)) and sizes:
            return len(sizes)
        return None
    if isinstance(module, (QLinear, QBatchNorm1d, Dropout, *CLIPS, *SMOOTH, QGELU)) and node.all_input_nodes:
        return rank_of(node.all_input_nodes[0], gm)
    return None


def _flattened(node: fx.Node, module: Any) -> tuple[Any, Any]:
    """The first and the last dimension that become one."""
    if isinstance(module.op, nn.Flatten):
        return module.op.start_dim, module.op.end_dim
    start, end = (*node.args[1:], None, None)[:2]
    return (
        node.kwargs.get("start_dim", 0) if start is None else start,
        node.kwargs.get("end_dim", -1) if end is None else end,
    )


@torch.no_grad()
def fold_into(conv: QuantOpr, bn: Any) -> None:
    """Change `conv` so that it computes bn(conv(x))."""
    gamma, shift = affine_of(bn)
    weight = conv.weight
    shape = [1] * weight.dim()
    if conv.weight_axis == 0:
        shape[0] = -1
        folded = weight * gamma.to(weight.dtype).reshape(shape)
    else:  # (in, out / groups, ...): group g of the inputs makes group g of the outputs
        parts = weight.unflatten(0, (conv.groups, -1))
        factor = gamma.to(weight.dtype).reshape(conv.groups, 1, -1, *shape[2:])
        folded = (parts * factor).flatten(0, 1)
    # a new one: others may share the old
    conv.weight = nn.Parameter(folded, requires_grad=weight.requires_grad)
    bias = shift if conv.bias is None else conv.bias * gamma + shift
    conv.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=weight.requires_grad)


def affine_of(bn: Any) -> tuple[Tensor, Tensor]:
    """A BatchNorm in eval mode is `x * gamma + shift`; in float64, so that folding costs no precision."""
    assert bn.running_var is not None and bn.running_mean is not None
    gamma = (bn.running_var.double() + bn.eps).rsqrt()
    if bn.weight is not None:
        gamma = gamma * bn.weight.double()
    shift = -bn.running_mean.double() * gamma
    if bn.bias is not None:
        shift = shift + bn.bias.double()
    return gamma, shift
