"""fuse_bn: fold a BatchNorm into the convolution before it.

w' = w * gamma / sqrt(var + eps)        b' = (b - mean) * gamma / sqrt(var + eps) + beta
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.graph.ops import module_calls
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.pattern import Match, Pat, Rule
from sparsebit.quantization.modules.base import QuantOpr
from sparsebit.quantization.modules.conv import QConv2d, QConvTranspose2d
from sparsebit.quantization.modules.normalization import QBatchNorm2d

CONV_BN = Pat(QBatchNorm2d, Pat((QConv2d, QConvTranspose2d), name="conv"), name="bn")


@graph_pass(
    "fuse_bn", when=lambda cfg: cfg.schedule.fuse_bn and not cfg.schedule.bn_tuning, keeps_output=True
)
def fuse_bn(gm: fx.GraphModule, ctx: Any) -> int:
    calls = module_calls(gm)

    def fold(m: Match) -> fx.Node | None:
        conv, bn = m.module("conv"), m.module("bn")
        if calls[str(m["conv"].target)] > 1 or calls[str(m["bn"].target)] > 1:
            return m.decline("the convolution or the BatchNorm is called more than once")
        if bn.running_var is None:
            return m.decline("the BatchNorm has no running statistics (track_running_stats=False)")
        fold_into(conv, bn)
        gm.__dict__[f"{m['conv'].name}_bn"] = conv  # the original's name for a folded layer
        return m["conv"]

    return Rule("fuse_bn", CONV_BN, fold).apply(gm)


@torch.no_grad()
def fold_into(conv: QuantOpr, bn: nn.BatchNorm2d) -> None:
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
    conv.weight = nn.Parameter(
        folded, requires_grad=weight.requires_grad
    )  # a new one: others may share the old
    bias = shift if conv.bias is None else conv.bias * gamma + shift
    conv.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=weight.requires_grad)


def affine_of(bn: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """A BatchNorm in eval mode is `x * gamma + shift`; in float64, so that folding costs no precision."""
    assert bn.running_var is not None and bn.running_mean is not None
    gamma = (bn.running_var.double() + bn.eps).rsqrt()
    if bn.weight is not None:
        gamma = gamma * bn.weight.double()
    shift = -bn.running_mean.double() * gamma
    if bn.bias is not None:
        shift = shift + bn.bias.double()
    return gamma, shift
