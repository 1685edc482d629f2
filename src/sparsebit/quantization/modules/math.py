"""Arithmetic. Additions, and products behind convolutions, quantize their inputs when A.QADD.ENABLE_QUANT asks for it;
the rest stays float."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from sparsebit.graph.ops import called_module
from sparsebit.quantization.common import Backend, get_backend
from sparsebit.quantization.modules.activations import (
    QGELU,
    QHardSigmoid,
    QHardSwish,
    QLeakyReLU,
    QMish,
    QReLU,
    QReLU6,
    QSigmoid,
    QSiLU,
    QSoftmax,
    QTanh,
)
from sparsebit.quantization.modules.base import MultipleInputsQuantOpr, Opr, define, register_qmodule, spelled
from sparsebit.quantization.modules.conv import (
    QConv1d,
    QConv2d,
    QConv3d,
    QConvTranspose1d,
    QConvTranspose2d,
    QConvTranspose3d,
)
from sparsebit.quantization.modules.float_ops.python_builtins import QGetItem
from sparsebit.quantization.modules.normalization import (
    QBatchNorm1d,
    QBatchNorm2d,
    QBatchNorm3d,
    QGroupNorm,
    QInstanceNorm,
    QLayerNorm,
    QRMSNorm,
)
from sparsebit.quantization.modules.pool import QMean as QMean  # Legacy: the original has it in this file
from sparsebit.quantization.modules.shape import Expand, Flatten, Permute, Reshape, Squeeze, Transpose
from sparsebit.quantization.modules.unary import Cast, Clone, Contiguous, Dropout

QSubtract = define("QSubtract", Opr, *spelled("sub subtract rsub"))
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

FLOAT_READERS = (QLayerNorm, QRMSNorm, QGroupNorm, QInstanceNorm, QSubtract, QDivide, QPow, Reduce)
MOVES = (Flatten, Reshape, Transpose, Permute, Squeeze, Expand, QGetItem, Cast, Clone, Contiguous, Dropout)
CONVS = (QConv1d, QConv2d, QConv3d, QConvTranspose1d, QConvTranspose2d, QConvTranspose3d)
WITH_CONV = (QBatchNorm1d, QBatchNorm2d, QBatchNorm3d, QReLU, QReLU6)
GATES = (QSigmoid, QHardSigmoid, QSiLU, QHardSwish, QMish, QGELU, QTanh, QLeakyReLU)  # in front of a product


@register_qmodule(sources=spelled("add"))
class QAdd(MultipleInputsQuantOpr):
    why_float = ""  # in the words of the pre-flight report

    def __init__(self, org_module: Any = None, config: Any = None):
        super().__init__(org_module, config)
        self.apply_input_quant = config is None or bool(config.a.qadd.enable_quant)

    def prepare_input_quantizer(self, node: fx.Node, model: fx.GraphModule) -> int:
        """Quantize both inputs. Not for a mask that is added to logits: the softmax quantizes the sum. Not for a sum
        that is added in float anyway, because a reader needs it in float; but a convolution is integer only if its
        output is quantized.
        """
        if feeds_softmax(node, model):
            self.why_float = "the softmax behind it quantizes the sum"
        elif is_float_sum(node, model):
            self.why_float = "its sum is read in float"
        if self.why_float:
            return 0
        return super().prepare_input_quantizer(node, model)


@register_qmodule(sources=spelled("mul multiply"))
class QMul(MultipleInputsQuantOpr):
    """A product of two values. For onnxruntime, behind convolutions, both are quantized (squeeze-and-excite, gates): a
    convolution is integer only if all of its readers take codes. Elsewhere a product stays float."""

    why_float = "this op is not quantized"

    def __init__(self, org_module: Any = None, config: Any = None):
        super().__init__(org_module, config)
        asked = config is not None and config.a.qadd.enable_quant and not config.a.quantizer.disable
        self.apply_input_quant = bool(asked) and get_backend(config.backend) is Backend.ONNXRUNTIME

    def prepare_input_quantizer(self, node: fx.Node, model: fx.GraphModule) -> int:
        if not any(made_by_conv(x, model, GATES) for x in node.all_input_nodes):
            return 0
        return super().prepare_input_quantizer(node, model)


def feeds_softmax(node: fx.Node, gm: fx.GraphModule, depth: int = 8) -> bool:
    """Is the value used by softmaxes only, behind nothing but sums, casts and views?"""
    if not node.users or not depth:
        return False
    for user in node.users:
        module = called_module(user, gm)
        between = isinstance(module, (QAdd, Cast, Reshape)) and feeds_softmax(user, gm, depth - 1)
        if not between and not isinstance(module, QSoftmax):
            return False
    return True


def is_float_sum(node: fx.Node, gm: fx.GraphModule, depth: int = 8) -> bool:
    """Is the sum read in float, and no convolution in front of it?"""
    sources = node.all_input_nodes
    return is_read_in_float(node, gm, depth) and not any(made_by_conv(x, gm) for x in sources)


def is_read_in_float(node: fx.Node, gm: fx.GraphModule, depth: int = 8) -> bool:
    """Does a norm, also one that is written by hand, read the value, directly or through ops that only move it?

    Tokens and channels of very different size meet in the sums in front of a norm. One scale for all of them costs 10
    dB (class tokens). No runtime adds in integers if the result must be float.
    """
    for user in node.users if depth else ():
        module = called_module(user, gm)
        if isinstance(module, (*FLOAT_READERS, QMul)):
            return True
        if isinstance(module, MOVES) and is_read_in_float(user, gm, depth - 1):
            return True
        if isinstance(module, QAdd) and is_float_sum(user, gm, depth - 1):
            return True
    return False


def made_by_conv(
    node: fx.Node, gm: fx.GraphModule, between: tuple[type[Any], ...] = (), depth: int = 8
) -> bool:
    """Is the value the output of a convolution, directly, after an op that is fused with it, or through ops that only
    move it?"""
    module = called_module(node, gm)
    if isinstance(module, CONVS):
        return True
    source = None
    if node.args and isinstance(module, (*MOVES, *WITH_CONV, *between)):
        source = node.args[0]
    return depth > 0 and isinstance(source, fx.Node) and made_by_conv(source, gm, between, depth - 1)
