"""Ops of torchvision, registered by name: torchvision is never imported."""

from __future__ import annotations

from sparsebit.quantization.modules.base import Opr, register_qmodule


@register_qmodule(sources=["torchvision.ops.stochastic_depth.stochastic_depth"])
class StochasticDepth(Opr):
    pass


@register_qmodule(
    sources=["torchvision.ops.drop_block.drop_block2d", "torchvision.ops.drop_block.drop_block3d"]
)
class DropBlock(Opr):
    pass
