"""Ops that work value by value, or inside a channel: labels pass, and the labels of tensors that meet are
joined."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.graph.ops import argument, op_of
from sparsebit.sparse.labels.labels import FIXED
from sparsebit.sparse.labels.rules import channel_rule
from sparsebit.sparse.labels.rules.moves import getitem, spelled

if TYPE_CHECKING:
    from sparsebit.sparse.labels.walk import Walk

UNARY = spelled(
    "relu relu_ relu6 leaky_relu leaky_relu_ elu elu_ selu celu gelu silu mish softplus hardswish hardsigmoid hardtanh "
    "sigmoid sigmoid_ tanh tanh_ logsigmoid softsign tanhshrink hardshrink softshrink threshold dropout dropout1d "
    "dropout2d dropout3d alpha_dropout feature_alpha_dropout abs neg negative exp expm1 log log1p sqrt rsqrt square "
    "sin cos erf floor ceil round sign reciprocal float half double bfloat16 to type type_as nan_to_num "
    "requires_grad_ positive zeros_like ones_like full_like"
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


@channel_rule(*spelled("new_zeros new_ones"))
def filled(walk: Walk, node: fx.Node, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A constant in the shape of its source can be cut like the source."""
    if walk.values[node].shape == input.shape:
        return input
    return made(walk, node, *node.args[1:], **kwargs)


@channel_rule(torch.zeros, torch.ones)
def made(walk: Walk, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    """A constant tensor: `torch.zeros(layers, b, 64)` takes the channels of the tensors that it meets.
    Computed sizes keep their value."""
    if node.op == "call_method":
        given: Any = node.args[1:]
    else:
        given = node.args
    given = given or (node.kwargs["size"],)
    if isinstance(given[0], (tuple, list)):
        sizes = given[0]
    else:
        sizes = given
    value = walk.values[node]
    if not sizes or not isinstance(sizes[-1], int) or not value.is_floating_point() or not value.numel():
        return walk.fixed(value)
    return walk.make(node, sizes[-1], -1)[1]


BINARY = spelled(
    "add add_ sub sub_ subtract rsub mul mul_ multiply div div_ divide true_divide pow maximum minimum where lerp "
    "addcmul addcdiv eq ne lt le gt ge logical_and logical_or masked_fill masked_fill_ fmod remainder atan2 fmax fmin "
    "clamp clamp_ clip clip_ clamp_min clamp_min_ clamp_max clamp_max_ hypot logaddexp copysign heaviside"
)
OPERATORS = "add sub mul truediv floordiv mod pow iadd isub imul itruediv eq ne lt le gt ge and_ or_ xor"


@channel_rule(*BINARY, *(getattr(operator, name) for name in OPERATORS.split()))
def meet(walk: Walk, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    found = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    return _met(walk, node, found, walk.values[node].shape)


def _met(walk: Walk, node: fx.Node, found: list[Tensor], shape: torch.Size) -> Tensor:
    """An operand may have only some of the axes of channels: a table of positions for all heads."""
    largest = lambda t: (t.shape == shape, len(walk.labels.varies(t)), t.numel())
    out, *others = sorted(found, key=largest, reverse=True)
    out = out.expand(shape)
    for other in others:
        aligned = [1] * (len(shape) - other.dim()) + list(other.shape)
        axes = walk.labels.varies(out)
        shared = [d for d in axes if aligned[d] > 1]
        if walk.heads == "dimension" and 0 < len(shared) < len(axes):
            axes = sorted(walk.settle_heads(out, axes[-1:]))
            shared = [d for d in axes if aligned[d] > 1]
        if len(shared) == len(axes):
            walk.labels.join(out, other.expand(shape))
        elif bool((walk.labels.roots(other) != FIXED).any()):
            walk.fix(other, node, "is spread over all channels of another tensor")
        if 0 < len(shared) < len(axes):
            walk.labels.whole(out, shared)
    return out


@channel_rule(operator.setitem)
def setitem(walk: Walk, node: fx.Node, x: Any, index: Any, value: Any) -> Any:
    """The written value depends on the place that it is written to: readers of `x` read both."""
    if isinstance(x, Tensor):
        part = getitem(walk, node, x, index)
    else:
        part = NotImplemented
    if part is NotImplemented:
        return part
    if isinstance(value, Tensor) and part.numel():
        value = value.reshape(value.shape[max(0, value.dim() - part.dim()) :])
        if not bool((walk.labels.roots(part) != FIXED).any()):
            walk.fix(value, node, "is written into a tensor that is kept")
        _met(walk, node, [part, value], part.shape)
    return None


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
    """Pools and resizes mix positions of one channel, and not channels."""
    out = walk.values[node]
    if not isinstance(out, Tensor) or input.dim() < 3:
        return NotImplemented
    axis = None
    if input.dim() == out.dim() and out.shape[0] == input.shape[0] and out.shape[1] == input.shape[1]:
        axis = 1
    if axis is None:
        return NotImplemented
    return walk.spread(node, walk.labels.along(input, axis), axis)


REDUCE = spelled("mean sum amax amin max min std var std_mean var_mean prod any all logsumexp argmax argmin")
SUM = spelled("sum")
NORMS = [*spelled("norm"), torch.linalg.vector_norm]
PAIRS = spelled("max min")
STATISTICS = {*spelled("mean var std var_mean std_mean amax amin logsumexp"), *PAIRS, *NORMS}


def over_given_axes(node: fx.Node, gm: fx.GraphModule) -> bool:
    """Is it a statistic over given axes, which also works with fewer channels? `max` returns values and
    positions: only the values may be in use."""
    op = None
    if node.op in ("call_function", "call_method"):
        op = op_of(node, gm)
    if op not in STATISTICS or not (node.args or "input" in node.kwargs):
        return False
    dims = argument(node, 2 if op in NORMS else 1, "dim", node.kwargs.get("axis"))
    sizes = dims if isinstance(dims, (list, tuple)) else [dims]
    if not sizes or not all(type(d) is int for d in sizes):
        return False
    values = lambda user: user.target in (operator.getitem, getattr) and user.args[1] in (0, "values")
    dead = lambda user: user.op != "output" and not user.users
    return op not in PAIRS or all(values(user) or dead(user) for user in node.users)


@channel_rule(*REDUCE)
def reduce(walk: Walk, node: fx.Node, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A reduction over positions keeps the label of the channel. A reduction over channels needs a sum of values that
    are zero where a channel is removed, or a statistic, which is then that of the channels that are left.
    Otherwise the channels are kept."""
    out = walk.values[node]
    dims = kwargs.get("dim", kwargs.get("axis", args[0] if args else None))
    if isinstance(dims, Tensor):  # max(x, y)
        return meet(walk, node, input, *args, **kwargs)
    if dims is None:
        over: Sequence[int] = range(input.dim())
    elif isinstance(dims, int):
        over = [dims]
    else:
        over = list(dims)
    over = [d % input.dim() for d in over]
    varies = walk.settle_heads(input, over)
    if set(over) & varies:
        is_sum = op_of(node, walk.gm) in SUM and node.all_input_nodes[0] in walk.zero
        if len(varies) != 1 or not (is_sum or over_given_axes(node, walk.gm)):
            return NotImplemented
        if not is_sum:
            (axis,) = varies
            line = walk.labels.along(input, axis)
            loose = walk.labels.roots(line)[walk.labels.roots(line) != FIXED]
            # flattened channels and positions, as many as in the example
            if len(loose.unique()) < len(loose):
                return NotImplemented
            walk.statistics[node.name] = line.reshape(-1, *[1] * (input.dim() - 1 - axis))
        return pytree.tree_map_only(Tensor, walk.fixed, out if isinstance(out, Tensor) else tuple(out))
    first = input
    for d in over:
        first = first.narrow(d, 0, 1)
    # values and indices
    if isinstance(out, Tensor):
        results = [out]
    else:
        results = list(out)
    if results[0].dim() == input.dim():
        small = first
    else:
        small = first.squeeze(tuple(over))
    if isinstance(out, Tensor):
        return small
    return (small,) * len(results)


@channel_rule(*NORMS)
def norm(
    walk: Walk, node: fx.Node, input: Tensor, p: Any = 2, dim: Any = None, *args: Any, **kwargs: Any
) -> Any:
    return reduce(walk, node, input, dim)


@channel_rule(
    *spelled("softmax log_softmax softmin cumsum cumprod"),
    nn.Softmax,
    nn.LogSoftmax,
    nn.Softmin,
    nn.Softmax2d,
)
def over_an_axis(walk: Walk, node: fx.Node, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    if node.op == "call_module":
        module = walk.module(node)
        if isinstance(module, nn.Softmax2d):
            dim: Any = -3
        else:
            dim = module.dim
    else:
        dim = kwargs.get("dim", args[0] if args else None)
    return _unless_along(walk, input, dim)


@channel_rule(F.normalize)
def normalize(walk: Walk, node: fx.Node, input: Tensor, p: float = 2.0, dim: int = 1, **kwargs: Any) -> Any:
    if (
        p == 2
        and {*walk.labels.varies(input)} == {dim % input.dim()}
        and argument(node, 0, "input") in walk.zero
    ):
        return input  # zeros add nothing to the norm
    return _unless_along(walk, input, dim)


def _unless_along(walk: Walk, input: Tensor, dim: Any) -> Any:
    if not isinstance(dim, int) or dim % input.dim() in walk.settle_heads(input, [dim % input.dim()]):
        return NotImplemented
    return input


@channel_rule(F.glu, nn.GLU)
def glu(walk: Walk, node: fx.Node, input: Tensor, dim: int = -1) -> Any:
    """One half gates the other: both lose the same positions."""
    if node.op == "call_module":
        dim = walk.module(node).dim
    a, b = input.chunk(2, dim)
    walk.labels.join(a, b)
    return a
