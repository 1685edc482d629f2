"""disable_unnecessary_quant: an activation that the runtime computes together with the op before it needs no
quantizer of its own input."""

from __future__ import annotations

from typing import Any

from torch import fx

from sparsebit.graph.passes import graph_pass
from sparsebit.graph.pattern import Match, Pat, Rule
from sparsebit.quantization.modules.activations import (
    QGELU,
    QHardSigmoid,
    QLeakyReLU,
    QMish,
    QReLU,
    QReLU6,
    QSigmoid,
    QSiLU,
)
from sparsebit.quantization.modules.conv import QConv2d, QConvTranspose2d
from sparsebit.quantization.modules.linear import QLinear
from sparsebit.quantization.modules.math import QAdd
from sparsebit.quantization.modules.normalization import QBatchNorm1d, QBatchNorm2d

SMOOTH = (QSigmoid, QLeakyReLU, QMish, QSiLU, QHardSigmoid)
FOLLOWERS: dict[tuple[Any, ...], tuple[Any, ...]] = {  # producers -> activations computed with them
    (QConv2d, QConvTranspose2d, QBatchNorm2d, QBatchNorm1d): (QReLU, QReLU6, *SMOOTH),
    (QLinear,): (QReLU, QReLU6, *SMOOTH, QGELU),
    (QAdd,): (QReLU, QReLU6),
}


def _absorb(m: Match) -> fx.Node | None:
    follower = m.module("follower")
    if follower.input_quantizer is None or follower.input_quantizer.absorbed:
        return m.decline("has no active quantizer")
    follower.set_fake_fused()
    return m.anchor


RULES = [
    Rule(
        "disable_unnecessary_quant",
        Pat(followers, Pat(producers, shared=True), name="follower"),
        _absorb,
    )
    for producers, followers in FOLLOWERS.items()
]


@graph_pass(
    "disable_unnecessary_quant", when=lambda cfg: cfg.schedule.disable_unnecessary_quant, keeps_output=True
)
def disable_unnecessary_quant(gm: fx.GraphModule, ctx: Any) -> int:
    return sum(rule.apply(gm) for rule in RULES)
