"""disable_unnecessary_quant: an activation that the runtime computes together with the op before it needs no input
quantizer.

onnxruntime fuses only clips. Its convolutions are integer only if their output is: there an activation that is no
clip keeps its quantizer. (A Linear is integer with float output too.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from sparsebit.export.kernels.integer_kernels import why_float
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.pattern import Match, Pat, Rule
from sparsebit.quantization.common import Backend
from sparsebit.quantization.converters.utils import InputMatchingType, MatchingNode, ReplacePatternBase
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
    is_pointwise,
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
IN_INTEGERS = (QSigmoid, QLeakyReLU, QHardSigmoid)  # onnxruntime has tables for them
SMOOTH = (QSigmoid, QLeakyReLU, QMish, QSiLU, QHardSigmoid, QHardSwish, QPReLU, QELU, QSELU, QCELU, QSoftplus)
FOLLOWERS: dict[tuple[Any, ...], tuple[Any, ...]] = {  # producers -> activations computed with them
    (*CONVS, *BATCH_NORMS): (*CLIPS, *SMOOTH, QGELU),
    (QLinear, QBilinear): (*CLIPS, *SMOOTH, QGELU),
    (QAdd,): (QReLU, QReLU6),
}


def _absorb(m: Match) -> fx.Node | None:
    follower = m.module("follower")
    why = _why_kept(m.module("producer"), follower)
    if why:
        return m.decline(why)
    follower.set_fake_fused()
    return m.anchor


def _why_kept(producer: Any, follower: Any) -> str:
    """Why the follower keeps its quantizer; empty if it needs none."""
    quantizer = getattr(follower, "input_quantizer", None)
    if quantizer is None or quantizer.absorbed:
        return "has no active quantizer"
    gives_float = is_pointwise(producer) and not isinstance(follower, IN_INTEGERS)
    smooth = isinstance(follower, (*SMOOTH, QGELU)) and not gives_float
    if smooth and wants_integer_output(producer, quantizer):
        return "keeps the convolution in front of it integer"
    return ""


def wants_integer_output(conv: Any, behind: Quantizer) -> bool:
    """Is `conv` an integer convolution in onnxruntime if its output is quantized, at a price worth paying?"""
    if behind.backend is not Backend.ONNXRUNTIME or not isinstance(conv, INTEGER_CONVS):
        return False
    weight = conv.weight_quantizer
    inputs = conv.input_specs()
    if weight is None or weight.absorbed or not inputs:
        return False
    return behind.bit == 8 and not why_float("Conv", weight.spec, inputs, output=True)


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


# -- Legacy: the class form of the original API ----------------------------------------------------------
def make_chain_connection(op_types: Sequence[Any]) -> list[MatchingNode]:
    """Legacy: a pattern of ops that read each other: `[QConv2d, (QReLU, QReLU6)]`, first the op, then its reader."""
    nodes: list[MatchingNode] = []
    for i, ops in enumerate(op_types):
        if isinstance(ops, (tuple, list, set, frozenset)):
            kinds = list(ops)
        else:
            kinds = [ops]
        before = [nodes[-1].name] if nodes else []
        nodes.append(MatchingNode(f"op_{i}", before, kinds, input_match_type=InputMatchingType.SUBSET))
    return nodes


class ReplacePattern_DisableQuant(ReplacePatternBase):
    """Legacy: the last op of a chain needs no quantizer; without a chain, all chains of `ReplacePatterns`."""

    def __init__(self, nodes: list[MatchingNode] | None = None):
        self._chain = nodes or []
        super().__init__()

    def make_nodes(self) -> list[MatchingNode]:
        return self._chain

    def make_joint_checkers(self) -> list[Any]:
        names = [node.name for node in self.make_nodes()[-2:]]

        def needs_none(*nodes: fx.Node, modules: dict[str, Any]) -> bool:
            return not _why_kept(modules[names[0]], modules[names[-1]])

        return [(names, needs_none)]

    def get_new_graph(
        self,
        nodes_dict: dict[str, fx.Node],
        modules_dict: dict[str, nn.Module],
        model: fx.GraphModule,
        transform_idx: int,
    ) -> dict[str, fx.Node]:
        last = self.nodes[-1].name
        follower: Any = modules_dict[last]
        follower.set_fake_fused()
        return {last: nodes_dict[last]}

    def apply(self, m: fx.GraphModule) -> bool:
        if self.nodes:
            return super().apply(m)
        changed = [pattern.apply(m) for pattern in ReplacePatterns]
        return any(changed)


ReplacePatterns = [
    ReplacePattern_DisableQuant(make_chain_connection([producers, followers]))
    for producers, followers in FOLLOWERS.items()
]
