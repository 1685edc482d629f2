"""Arithmetic. An Add quantizes its inputs when A.QADD.ENABLE_QUANT asks for it; the rest stays float."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from sparsebit.quantization.modules.activations import QSoftmax
from sparsebit.quantization.modules.base import MultipleInputsQuantOpr, Opr, define, register_qmodule, spelled
from sparsebit.quantization.modules.shape import Reshape
from sparsebit.quantization.modules.unary import Cast


@register_qmodule(sources=spelled("add"))
class QAdd(MultipleInputsQuantOpr):
    @classmethod
    def wants_input_quant(cls, config: Any) -> bool:
        return bool(config.a.qadd.enable_quant)

    def prepare_input_quantizer(self, node: fx.Node, model: fx.GraphModule) -> int:
        """A mask added to the logits of a softmax must not meet a grid: the softmax quantizes the sum."""
        return 0 if feeds_softmax(node, model) else super().prepare_input_quantizer(node, model)


def feeds_softmax(node: fx.Node, gm: fx.GraphModule, depth: int = 8) -> bool:
    """Is the value used by softmaxes only, behind nothing but sums, casts and views?"""
    if not node.users or not depth:
        return False
    for user in node.users:
        module = gm.get_submodule(str(user.target)) if user.op == "call_module" else None
        between = isinstance(module, (QAdd, Cast, Reshape)) and feeds_softmax(user, gm, depth - 1)
        if not between and not isinstance(module, QSoftmax):
            return False
    return True


QSubtract = define("QSubtract", Opr, *spelled("sub subtract rsub"))
QMul = define("QMul", Opr, *spelled("mul multiply"))
QDivide = define("QDivide", Opr, *spelled("truediv div divide true_divide"))
QFloorDiv = define("QFloorDiv", Opr, *spelled("floordiv floor_divide"))
QPow = define("QPow", Opr, *spelled("pow float_power square sqrt rsqrt reciprocal"))

Pointwise = define(
    "Pointwise",
    Opr,
    *spelled("neg negative pos positive abs absolute sign sgn signbit copysign mod fmod remainder"),
    *spelled(
        "exp exp2 expm1 log log2 log10 log1p logaddexp logaddexp2 xlogy xlog1py logit lerp addcmul addcdiv"
    ),
    *spelled("clamp clamp_min clamp_max clip nan_to_num maximum minimum fmax fmin hypot heaviside"),
    *spelled("round floor ceil trunc fix frac sin cos tan asin acos atan atan2 arcsin arccos arctan arctan2"),
    *spelled("sinh cosh asinh acosh atanh arcsinh arccosh arctanh sinc deg2rad rad2deg"),
    *spelled(
        "erf erfc erfinv erfcx lgamma gammaln digamma psi polygamma mvlgamma multigammaln igamma igammac"
    ),
    *spelled("gammainc gammaincc i0 i0e i1 i1e ndtr ndtri log_ndtr entr zeta"),
    *spelled(
        "ldexp frexp nextafter gcd lcm real imag angle conj conj_physical resolve_conj resolve_neg polar complex"
    ),
    *spelled("normalize"),
    doc="Element by element: float.",
)
Compare = define(
    "Compare",
    Opr,
    *spelled("ne not_equal lt less le less_equal gt greater ge greater_equal equal isclose allclose isin"),
    *spelled("isnan isinf isfinite isposinf isneginf isreal is_nonzero"),
    *spelled("logical_and logical_or logical_xor logical_not and_ or_ xor invert not_ lshift rshift"),
    *spelled("bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift"),
    doc="Comparisons and logic: bool or integer results.",
)
Reduce = define(
    "Reduce",
    Opr,
    *spelled("sum nansum nanmean prod amax amin aminmax max min all any argmax argmin median nanmedian mode"),
    *spelled("std var std_mean var_mean norm vector_norm matrix_norm renorm dist count_nonzero logsumexp"),
    *spelled("quantile nanquantile kthvalue cumsum cumprod cummax cummin logcumsumexp diff trapz trapezoid"),
    *spelled("cumulative_trapezoid gradient trace histc histogram bincount cov corrcoef"),
    doc="Sums, extremes and statistics: float.",
)
Distance = define(
    "Distance",
    Opr,
    torch.nn.CosineSimilarity,
    torch.nn.PairwiseDistance,
    *spelled("cosine_similarity pairwise_distance cdist pdist"),
)
