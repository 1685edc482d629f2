"""disable_unnecessary_quant: an activation that the runtime computes together with the op before it needs no
quantizer of its own input.

onnxruntime fuses only clips. Its convolutions are integer only if their output is: there an activation that is no
clip keeps its quantizer. (A Linear is integer with float output too.)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from sparsebit.graph.passes import graph_pass
from sparsebit.graph.pattern import Match, Pat, Rule
from sparsebit.quantization.common import Backend
from sparsebit.quantization.modules.activations import (
    QCELU,
    QELU,
    QGELU,
    QSELU,
    QHardSigmoid,
    QHardSwish,
    QHardTanh,
    QLeakyReLU,
    QMish,
    QPReLU,
    QReLU,
    QReLU6,
    QSigmoid,
    QSiLU,
    QSoftplus,
    QThreshold,
)
from sparsebit.quantization.modules.conv import (
    QConv1d,
    QConv2d,
    QConv3d,
    QConvTranspose1d,
    QConvTranspose2d,
    QConvTranspose3d,
)
from sparsebit.quantization.modules.linear import QBilinear, QLinear
from sparsebit.quantization.modules.math import QAdd
from sparsebit.quantization.modules.normalization import (
    QBatchNorm1d,
    QBatchNorm2d,
    QBatchNorm3d,
    QSyncBatchNorm,
)
from sparsebit.quantization.quantizers import Quantizer

CONVS = (QConv1d, QConv2d, QConv3d, QConvTranspose1d, QConvTranspose2d, QConvTranspose3d)
INTEGER_CONVS = (QConv1d, QConv2d, QConv3d)
BATCH_NORMS = (QBatchNorm1d, QBatchNorm2d, QBatchNorm3d, QSyncBatchNorm)
CLIPS = (QReLU, QReLU6, QHardTanh, QThreshold)
SMOOTH = (QSigmoid, QLeakyReLU, QMish, QSiLU, QHardSigmoid, QHardSwish, QPReLU, QELU, QSELU, QCELU, QSoftplus)
FOLLOWERS: dict[tuple[Any, ...], tuple[Any, ...]] = {  # producers -> activations computed with them
    (*CONVS, *BATCH_NORMS): (*CLIPS, *SMOOTH),
    (QLinear, QBilinear): (*CLIPS, *SMOOTH, QGELU),
    (QAdd,): (QReLU, QReLU6),
}


def _absorb(m: Match) -> fx.Node | None:
    follower = m.module("follower")
    if follower.input_quantizer is None or follower.input_quantizer.absorbed:
        return m.decline("has no active quantizer")
    if isinstance(follower, SMOOTH) and _wants_integer_output(m.module("producer"), follower.input_quantizer):
        return m.decline("keeps the convolution in front of it integer")
    follower.set_fake_fused()
    return m.anchor


def _wants_integer_output(conv: Any, behind: Quantizer) -> bool:
    """Is `conv` an integer convolution in onnxruntime if its output is quantized, at a price worth paying?"""
    if behind.backend is not Backend.ONNXRUNTIME or not isinstance(conv, INTEGER_CONVS):
        return False
    x, w = conv.input_quantizer, conv.weight_quantizer
    if x is None or x.absorbed or w is None or w.absorbed:
        return False
    return behind.bit == 8 and x.bit <= 8 and 5 <= w.bit <= 8  # 4-bit weights are stored in another type


RULES = [
    Rule(
        "disable_unnecessary_quant",
        Pat(followers, Pat(producers, shared=True, name="producer"), ..., name="follower"),
        _absorb,
    )
    for producers, followers in FOLLOWERS.items()
]


@graph_pass(
    "disable_unnecessary_quant", when=lambda cfg: cfg.schedule.disable_unnecessary_quant, keeps_output=True
)
def disable_unnecessary_quant(gm: fx.GraphModule, ctx: Any) -> int:
    return sum(rule.apply(gm) for rule in RULES)
