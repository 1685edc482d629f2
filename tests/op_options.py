"""Legal values for the parameters of torch's ops; `calls()` draws call forms from torch's own signatures.

A signature gives names, order and defaults; LEGAL gives values by the parameter's name. Arguments are given by
position or by keyword at random. What torch itself refuses (a padding larger than half the kernel) is not a form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.overrides import get_testing_overrides

SIGNAL, IMAGE, VOLUME, TOKENS, BATCH = (2, 4, 10), (2, 4, 8, 8), (1, 4, 5, 6, 6), (2, 6, 4), (2, 6, 6)
FLAG = (False, True)
BEHIND_A_SWITCH = {getattr(F, f"max_pool{d}d"): getattr(F, f"max_pool{d}d_with_indices") for d in (1, 2, 3)}


@dataclass(frozen=True)
class Tensor:
    """A tensor argument: the model's input, or a parameter of this shape."""

    shape: tuple[int, ...] = ()
    is_input: bool = False


X = Tensor(is_input=True)
VALUES = """
input: X; self: X; tensor: X; other: X, 2.0; mat2: X; batch1: X; batch2: X; query: X; key: X
bias: *FLAG; affine: *FLAG; elementwise_affine: *FLAG; ceil_mode: *FLAG; count_include_pad: *FLAG; keepdim: *FLAG
track_running_stats: *FLAG; return_indices: *FLAG; inplace: *FLAG; descending: *FLAG; largest: *FLAG; sorted: *FLAG
is_causal: *FLAG; align_corners: *FLAG; unbiased: *FLAG; antialias: *FLAG; training: False; correction: 0, 1
in_channels: 4; num_features: 4; num_channels: 4; out_channels: 4, 6; in_features: 4; out_features: 3; groups: 1, 2, 4
kernel_size: 1, 2, 3; stride: 1, 2, 3; padding: 0, 1; dilation: 1, 2; output_padding: 0, 1; output_size: 1, 2, 3
padding_mode: "zeros", "reflect", "replicate", "circular"; divisor_override: None, 3; norm_type: 1, 2, 3.0; size: 2, 3
negative_slope: 0.01, 0.3; alpha: 0.5, 1.0, 2.0; beta: 1, 2.0; threshold: 0.2, 20; value: 0.0, 0.5; lambd: 0.1, 0.5
min_val: -0.5, -1.0; max_val: 0.5, 2.0; approximate: "none", "tanh"; num_parameters: 1, 4; init: 0.25, -0.3; k: 1, 3
eps: 1e-5, 0.1; num_groups: 1, 2, 4; normalized_shape: (4,), [6, 4]; momentum: 0.1, None; p: 0.5, 0.1
mode: "nearest", "bilinear", "bicubic", "nearest-exact", "area"; scale_factor: None, 2, 1.5; upscale_factor: 2
downscale_factor: 2; dim: -1, 0, 1, 2; dim0: 0, 1; dim1: -1, 1; start_dim: 0, 1; end_dim: -1, 2; chunks: 2, 3
split_size_or_sections: 2, 3; split_size: 1, [2, 2]; shifts: 1, -2; dims: (0,), (1, 2); diagonal: 0, 1; repeats: 2, 3
exponent: 2, 3.0; min: -0.5; max: 0.7; rounding_mode: None, "floor", "trunc"; decimals: 0, 1; scale: None, 0.3
pad: (1, 2), (0, 1, 1, 0)
"""
ENTRIES = (entry.split(": ", 1) for entry in VALUES.strip().replace("\n", "; ").split("; "))
LEGAL: dict[str, Sequence[Any]] = {
    name: eval(f"[{values}]", {"X": X, "FLAG": FLAG}) for name, values in ENTRIES
}


@dataclass(frozen=True)
class Op:
    """What is called: a module class or a function (a string: a Tensor method), its input, values of its own."""

    call: Any
    shape: tuple[int, ...]
    legal: dict[str, Sequence[Any]]
    quantizers: int  # -1: depends on the options

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(torch.Tensor, self.call) if isinstance(self.call, str) else self.call

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """From torch's signature, or, for what is written in C++, from torch's own table of overrides."""
        function = BEHIND_A_SWITCH.get(self.call, self.function)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            signature = inspect.signature(get_testing_overrides()[function])
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return [p for p in signature.parameters.values() if p.kind in kinds and p.name != "out"]


def _ops() -> list[Op]:
    def rows(shape: tuple[int, ...], quantizers: int, *calls: Any, **legal: Sequence[Any]) -> list[Op]:
        return [Op(call, shape, legal, quantizers) for call in calls]

    found = rows(TOKENS, 2, nn.Linear)
    for d, shape in ((1, SIGNAL), (2, IMAGE), (3, VOLUME)):
        layer = lambda kind: getattr(nn, f"{kind}{d}d")
        function = lambda name: getattr(F, f"{name}{d}d")
        weight = {"weight": [Tensor((4, 4, *[2] * d))], "bias": [None, Tensor((4,))], "groups": [1]}
        found += rows(shape, 2, layer("Conv"))
        found += rows(shape, 2, layer("ConvTranspose"), padding_mode=["zeros"])
        found += rows(shape, 2, function("conv"), function("conv_transpose"), **weight)
        found += rows(
            shape, 0, layer("BatchNorm"), layer("MaxPool"), layer("AdaptiveMaxPool"), function("max_pool")
        )
        found += rows(shape, 0, layer("InstanceNorm"))
        found += rows(shape, 1, layer("AvgPool"), layer("AdaptiveAvgPool"), layer("LPPool"))
        found += rows(shape, 1, function("avg_pool"), function("adaptive_avg_pool"), function("lp_pool"))
    found += rows(
        IMAGE,
        0,
        nn.GroupNorm,
        F.group_norm,
        nn.LocalResponseNorm,
        F.local_response_norm,
        weight=[None],
        bias=[None],
    )
    found += rows(IMAGE, -1, nn.Upsample, F.interpolate, size=[None, 5], recompute_scale_factor=[None])
    found += rows(
        IMAGE,
        0,
        nn.PixelShuffle,
        F.pixel_shuffle,
        nn.PixelUnshuffle,
        F.unfold,
        F.pad,
        mode=["constant", "reflect"],
    )
    found += rows(IMAGE, 0, nn.Dropout2d, F.dropout, nn.Flatten, nn.ChannelShuffle, nn.Unfold, groups=[2])
    found += rows(
        TOKENS, 0, nn.LayerNorm, F.layer_norm, nn.RMSNorm, F.rms_norm, weight=[None], bias=[True, None]
    )
    acts = [
        nn.ReLU,
        nn.LeakyReLU,
        nn.PReLU,
        nn.ELU,
        nn.SELU,
        nn.CELU,
        nn.GELU,
        nn.SiLU,
        nn.Mish,
        nn.Hardswish,
    ]
    acts += [
        nn.Hardtanh,
        nn.Softplus,
        nn.Softsign,
        nn.LogSigmoid,
        nn.Hardshrink,
        nn.Softshrink,
        nn.Tanhshrink,
        nn.GLU,
    ]
    acts += [
        nn.Threshold,
        nn.Softmax,
        nn.LogSoftmax,
        nn.Softmin,
        nn.Tanh,
        nn.Sigmoid,
        nn.Hardsigmoid,
        nn.ReLU6,
    ]
    acts += [
        F.relu,
        F.relu6,
        F.leaky_relu,
        F.elu,
        F.selu,
        F.celu,
        F.gelu,
        F.silu,
        F.mish,
        F.hardswish,
        F.hardsigmoid,
    ]
    acts += [
        F.hardtanh,
        F.softplus,
        F.softsign,
        F.logsigmoid,
        F.hardshrink,
        F.softshrink,
        F.tanhshrink,
        F.glu,
    ]
    acts += [
        F.softmax,
        F.log_softmax,
        F.softmin,
        torch.softmax,
        torch.sigmoid,
        torch.tanh,
        torch.relu,
    ]
    acts += ["relu", "sigmoid", "tanh", "softmax", "log_softmax", "hardshrink"]
    found += rows(TOKENS, 1, *acts, dtype=[None], init=[0.2], num_parameters=[1, 6], _stacklevel=[3])
    plain = [
        "sum amax amin var std argmax cumsum cumprod flatten transpose unsqueeze squeeze chunk split roll flip clamp"
    ]
    plain += ["pow sub mul div fmod round tril triu repeat_interleave topk sort prod norm exp abs neg unbind"]
    for name in " ".join(plain).split():
        spellings = [f for f in (getattr(torch, name), name) if f is name or callable(f)]
        found += rows(TOKENS, 0, *spellings, dtype=[None], p=[2, 1], stable=[])
    # over the last axis, which is kept, a mean belongs to a norm written by hand, and stays float
    found += rows(TOKENS, -1, torch.mean, "mean", dtype=[None])
    found += rows(BATCH, 1, torch.matmul, torch.bmm, "matmul", "bmm", other=[X], dim=[])
    found += rows(BATCH, 1, torch.baddbmm, "baddbmm", beta=[1, 0.5], alpha=[1, 2.0])
    found += rows(
        BATCH, 2, F.scaled_dot_product_attention, value=[X], attn_mask=[None], dropout_p=[0.0], enable_gqa=[]
    )
    return found


OPS = _ops()


@st.composite
def calls(draw: st.DrawFn) -> tuple[Op, tuple[Any, ...], dict[str, Any]]:
    """An op, and arguments for it: some by position, the others by keyword, in any order."""
    op = draw(st.sampled_from(OPS))
    values: dict[str, Any] = {}
    parameters = op.parameters[
        isinstance(op.call, str) :
    ]  # the first of a method is the tensor it is called on
    for p in parameters:
        legal = op.legal.get(p.name, LEGAL.get(p.name, ()))
        if legal and (p.default is p.empty or draw(st.booleans())):
            values[p.name] = draw(st.sampled_from(legal))
    args: list[Any] = []
    for p in parameters[: draw(st.integers(0, len(parameters)))]:
        if p.kind is p.KEYWORD_ONLY or (p.name not in values and p.default is p.empty):
            break
        args.append(values.pop(p.name, p.default))
    keywords = draw(st.permutations(sorted(values)))
    return op, tuple(args), {name: values[name] for name in keywords}


class Generated(nn.Module):
    """A model that makes one generated call, of a layer it owns, of a function or of a method."""

    def __init__(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], by_keyword: bool):
        super().__init__()
        is_layer = isinstance(op.call, type)
        self.layer = op.call(*args, **kwargs) if is_layer else None
        self.op = op.call
        self.args, self.kwargs = args, kwargs
        if is_layer:
            name = list(inspect.signature(op.call.forward).parameters)[1]
            self.args, self.kwargs = ((), {name: X}) if by_keyword else ((X,), {})
        self.made = nn.ParameterDict()
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor) and not value.is_input:
                self.made[str(value.shape)] = nn.Parameter(torch.randn(value.shape) / 2)

    def forward(self, x: Any) -> Any:
        fill = lambda v: v if not isinstance(v, Tensor) else x if v.is_input else self.made[str(v.shape)]
        args, kwargs = [fill(v) for v in self.args], {k: fill(v) for k, v in self.kwargs.items()}
        if self.layer is not None:
            return self.layer(*args, **kwargs)
        if isinstance(self.op, str):
            return getattr(x, self.op)(*args, **kwargs)
        return self.op(*args, **kwargs)
