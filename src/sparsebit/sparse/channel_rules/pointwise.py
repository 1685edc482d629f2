"""Ops that work value by value, or inside a channel: labels pass; where tensors meet, their labels join."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.sparse.channel_rules import channel_rule
from sparsebit.sparse.channel_rules.moves import spelled
from sparsebit.sparse.labels import FIXED

if TYPE_CHECKING:
    from sparsebit.sparse.channels import Walk

UNARY = spelled(
    "relu relu_ relu6 leaky_relu leaky_relu_ elu elu_ selu celu gelu silu mish softplus hardswish hardsigmoid hardtanh "
    "sigmoid sigmoid_ tanh tanh_ logsigmoid softsign tanhshrink hardshrink softshrink threshold dropout dropout1d "
    "dropout2d dropout3d alpha_dropout feature_alpha_dropout abs neg negative exp expm1 log log1p sqrt rsqrt square "
    "sin cos erf floor ceil round sign clamp clip reciprocal float half double bfloat16 to type type_as nan_to_num "
    "requires_grad_ positive"
)
ACTIVATIONS = [
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Softplus,
]
ACTIVATIONS += [
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Hardtanh,
    nn.Sigmoid,
    nn.Tanh,
    nn.LogSigmoid,
    nn.Softsign,
    nn.Threshold,
]
ACTIVATIONS += [
    nn.Tanhshrink,
    nn.Hardshrink,
    nn.Softshrink,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
]
ACTIVATIONS += [nn.AlphaDropout, nn.FeatureAlphaDropout]


@channel_rule(*UNARY, *ACTIVATIONS, operator.neg, operator.pos, operator.abs)
def unary(walk: Walk, node: fx.Node, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    return input


BINARY = spelled(
    "add add_ sub sub_ subtract rsub mul mul_ multiply div div_ divide true_divide pow maximum minimum where lerp "
    "addcmul addcdiv eq ne lt le gt ge logical_and logical_or masked_fill masked_fill_ fmod remainder atan2"
)
OPERATORS = "add sub mul truediv floordiv mod pow iadd isub imul itruediv eq ne lt le gt ge and_ or_ xor"


@channel_rule(*BINARY, *(getattr(operator, name) for name in OPERATORS.split()))
def meet(walk: Walk, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    shape = walk.values[node].shape
    found = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    ranked = sorted(found, key=lambda t: (len(walk.labels.varies(t)), t.numel()), reverse=True)
    out = ranked[0].expand(shape)
    axes = walk.labels.varies(out)
    for other in ranked[1:]:
        wide = other.expand(shape)
        aligned = [1] * (len(shape) - other.dim()) + list(other.shape)
        if walk.labels.varies(other) or any(aligned[d] > 1 for d in axes):
            walk.labels.join(out, wide)
        elif bool((walk.labels.roots(other) != FIXED).any()):
            walk.fix(other, node, "one channel that is spread over all of another tensor")
    return out


SPATIAL = [
    getattr(nn, f"{kind}Pool{d}d") for kind in ("Max", "Avg", "AdaptiveAvg", "AdaptiveMax") for d in (1, 2, 3)
]
SPATIAL += [nn.LPPool1d, nn.LPPool2d, nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d]
SPATIAL += [getattr(nn, f"{kind}Pad{d}d") for kind in ("Reflection", "Replication") for d in (1, 2, 3)]
FUNCTIONS = spelled(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d interpolate upsample lp_pool2d"
)


@channel_rule(*SPATIAL, *FUNCTIONS)
def inside_channels(walk: Walk, node: fx.Node, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Pools and resizes: positions of a channel meet, channels do not."""
    out = walk.values[node]
    if not isinstance(out, Tensor) or input.dim() < 3:
        return NotImplemented
    axis = (
        1
        if input.dim() == out.dim() and out.shape[0] == input.shape[0] and out.shape[1] == input.shape[1]
        else None
    )
    return NotImplemented if axis is None else walk.spread(node, walk.labels.along(input, axis), axis)


REDUCE = spelled("mean sum amax amin max min std var prod norm any all logsumexp argmax argmin")


@channel_rule(*REDUCE)
def reduce(walk: Walk, node: fx.Node, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Over positions: the channel's label stays. Over channels: fixed, for the result depends on how many there are."""
    out = walk.values[node]
    dims = kwargs.get("dim", kwargs.get("axis", args[0] if args else None))
    if isinstance(dims, Tensor):  # max(x, y)
        return meet(walk, node, input, *args, **kwargs)
    over = range(input.dim()) if dims is None else [dims] if isinstance(dims, int) else list(dims)
    over = [d % input.dim() for d in over]
    if set(over) & set(walk.labels.varies(input)):
        return NotImplemented
    first = input
    for d in over:
        first = first.narrow(d, 0, 1)
    keep = isinstance(out, Tensor) and out.dim() == input.dim()
    small = first if keep else first.squeeze(tuple(over)) if over else first
    return (
        small
        if isinstance(out, Tensor)
        else type(out)([small] * len(out))
        if type(out) is tuple
        else NotImplemented
    )


@channel_rule(
    *spelled("softmax log_softmax softmin cumsum cumprod normalize glu"),
    nn.Softmax,
    nn.LogSoftmax,
    nn.Softmax2d,
)
def over_an_axis(walk: Walk, node: fx.Node, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    if node.op == "call_module":
        dim = getattr(walk.module(node), "dim", None)
        dim = 1 if isinstance(walk.module(node), nn.Softmax2d) else dim
    else:
        dim = kwargs.get("dim", args[0] if args else None)
    if (
        not isinstance(dim, int)
        or dim % input.dim() in walk.labels.varies(input)
        or "glu" in str(node.target)
    ):
        return NotImplemented
    return input
