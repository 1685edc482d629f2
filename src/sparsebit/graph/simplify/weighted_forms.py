"""The functions with weights, one row each: their parameters, their weights, and the nn module that computes
the same."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.graph.export.experts import Experts, grouped_mm
from sparsebit.graph.ops import ADDS, is_op, op_of

Made = tuple[type[nn.Module], dict[str, Any]]  # a class and its options
_ACTIVATIONS = [
    "ReLU",
    "ReLU6",
    "SiLU",
    "Hardswish",
    "Hardsigmoid",
    "LeakyReLU",
    "GELU",
    "Sigmoid",
    "Tanh",
    "ELU",
    "Mish",
    "PReLU",
    "Hardtanh",
    "Softplus",
]
KEEP_RANK = frozenset(  # the first input has the rank of the output
    {
        *(getattr(nn, name) for name in _ACTIVATIONS),
        *(nn.Identity, nn.Dropout, nn.Dropout2d, nn.GroupNorm, nn.Upsample, nn.PixelShuffle),
        *(
            F.relu,
            F.relu6,
            F.silu,
            F.hardswish,
            F.gelu,
            F.leaky_relu,
            F.dropout,
            F.batch_norm,
            F.interpolate,
            F.pad,
        ),
        *(torch.relu, torch.sigmoid, torch.tanh, torch.cat, torch.Tensor.contiguous, torch.Tensor.relu),
    }
)

BROADCAST = frozenset({*ADDS, operator.mul, operator.sub, torch.mul, torch.sub, torch.Tensor.mul})


class NotAModule(Exception):
    """No module computes the same as this call."""


@dataclass(frozen=True)
class Form:
    """Reads a call of a function; `describe(values, rank)` returns the class and the options of its module.

    `values` are the arguments by name, with tensors in the slots; `rank` is that of the input, None if
    unknown.
    """

    names: tuple[str, ...]  # the parameters of the function, in order
    slots: tuple[str, ...]  # these become tensors of the module; the first is required
    describe: Callable[[dict[str, Any], int | None], Made]
    inputs: tuple[str, ...] = ("input",)  # the module is called with these
    spelled: tuple[tuple[str, str], ...] = ()  # (keyword of the function, its name here)

    def bind(self, node: fx.Node) -> dict[str, Any] | None:
        """The arguments by name; None if the call does not fit."""
        spelled = dict(self.spelled)
        named = {spelled.get(key, key): value for key, value in node.kwargs.items()}
        if len(node.args) > len(self.names) or not set(named) <= set(self.names):
            return None
        values = {**dict(zip(self.names, node.args)), **named}
        complete = values.get(self.inputs[0]) is not None and values.get(self.slots[0]) is not None
        return values if complete else None

    def inputs_of(self, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Args and kwargs of the module's call."""
        first, *rest = self.inputs
        return (values[first],), {name: values[name] for name in rest if name in values}


@dataclass(frozen=True)
class Matmul(Form):
    """`x @ W` is a Linear whose weight is the transpose of W."""

    def weight_of(self, node: fx.Node) -> fx.Node | None:
        """W, if a Linear can replace the call."""
        values = self.bind(node)
        if values is None or values.get("alpha", 1) != 1 or values.get("beta", 1) != 1:
            return None
        weight = values["weight"]
        if isinstance(weight, fx.Node) and weight is not values["input"]:
            return weight
        return None


def rank_of(node: Any, gm: fx.GraphModule, depth: int = 16) -> int | None:
    """The number of axes of a value. It is known after torch.export, and behind ops of fixed rank and ops
    that keep it."""
    if not isinstance(node, fx.Node) or not depth:
        return None
    if isinstance(node.meta.get("val"), Tensor):
        return node.meta["val"].dim()
    op = op_of(node, gm)
    name = getattr(op, "__name__", "").lower()
    if name.endswith(("1d", "2d", "3d")) and any(kind in name for kind in ("conv", "pool", "batchnorm")):
        if name != "batchnorm1d":
            return int(name[-2]) + 2
        return None
    joins = is_op(op, BROADCAST)
    if not joins and not is_op(op, KEEP_RANK):
        return None
    ranks = []
    for x in node.all_input_nodes if joins else node.all_input_nodes[:1]:
        ranks.append(rank_of(x, gm, depth - 1))
    known = [rank for rank in ranks if rank is not None]
    if known and len(known) == len(ranks):
        return max(known)
    return None


def _linear(v: dict[str, Any], rank: int | None) -> Made:
    weight = v["weight"]
    bias = v.get("bias")
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise NotAModule
    if v.get("alpha", 1) != 1 or v.get("beta", 1) != 1:
        raise NotAModule
    out_features, in_features = weight.shape
    return nn.Linear, {"in_features": in_features, "out_features": out_features, "bias": bias is not None}


def _conv(dims: int, transpose: bool) -> Callable[[dict[str, Any], int | None], Made]:
    cls = getattr(nn, f"ConvTranspose{dims}d" if transpose else f"Conv{dims}d")

    def describe(v: dict[str, Any], rank: int | None) -> Made:
        weight = v["weight"]
        groups = v.get("groups", 1)
        if weight.dim() != dims + 2:
            raise NotAModule
        one = weight.shape[0]
        other = weight.shape[1] * groups
        options = {
            "in_channels": one if transpose else other,
            "out_channels": other if transpose else one,
            "kernel_size": tuple(weight.shape[2:]),
            "groups": groups,
            "bias": v.get("bias") is not None,
        }
        for name in ("stride", "padding", "dilation", "output_padding"):
            if name in v:
                options[name] = _per_axis(v[name], dims)
        return cls, options

    return describe


def _per_axis(value: Any, dims: int) -> Any:
    """2, [2] and (2, 2) are the same stride of a 2-D convolution; "same" stays."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) == 1:
            return tuple(value) * dims
        return tuple(value)
    return value


def _embedding(v: dict[str, Any], rank: int | None) -> Made:
    options = {"num_embeddings": v["weight"].shape[0], "embedding_dim": v["weight"].shape[1]}
    for name in ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"):
        if name in v:
            options[name] = v[name]
    if options.get("padding_idx", 0) == -1 and "indices" in v:
        del options["padding_idx"]  # torch.embedding: none
    return nn.Embedding, options


def _embedding_bag(v: dict[str, Any], rank: int | None) -> Made:
    options = {"num_embeddings": v["weight"].shape[0], "embedding_dim": v["weight"].shape[1]}
    skipped = ("input", "weight", "offsets", "per_sample_weights")
    return nn.EmbeddingBag, {**options, **{k: x for k, x in v.items() if k not in skipped}}


def _layer_norm(v: dict[str, Any], rank: int | None) -> Made:
    shape = v["normalized_shape"]
    options = {"eps": v.get("eps", 1e-5), "bias": v.get("bias") is not None}
    return nn.LayerNorm, {"normalized_shape": [shape] if isinstance(shape, int) else list(shape), **options}


def _rms_norm(v: dict[str, Any], rank: int | None) -> Made:
    return nn.RMSNorm, {"normalized_shape": list(v["normalized_shape"]), "eps": v.get("eps")}


def _group_norm(v: dict[str, Any], rank: int | None) -> Made:
    channels = v["weight"].numel()
    eps = v.get("eps", 1e-5)
    return nn.GroupNorm, {"num_groups": v["num_groups"], "num_channels": channels, "eps": eps}


def _batch_norm(v: dict[str, Any], rank: int | None) -> Made:
    """Only with the statistics of eval mode."""
    mean = v["running_mean"]
    if v.get("training", False) or v.get("running_var") is None or rank not in (2, 3, 4, 5):
        raise NotAModule
    if (v.get("weight") is None) != (v.get("bias") is None):
        raise NotAModule
    if rank == 2:
        cls = nn.BatchNorm1d
    else:
        cls = getattr(nn, f"BatchNorm{rank - 2}d")
    options = {"affine": v.get("weight") is not None, "eps": v.get("eps", 1e-5)}
    return cls, {"num_features": mean.numel(), "momentum": v.get("momentum", 0.1), **options}


def _instance_norm(v: dict[str, Any], rank: int | None) -> Made:
    tracked = v.get("running_mean") is not None
    if rank not in (3, 4, 5) or tracked is bool(v.get("use_input_stats", True)):
        raise NotAModule
    if v.get("bias") is None or tracked is not (v.get("running_var") is not None):
        raise NotAModule
    options = {"eps": v.get("eps", 1e-5), "momentum": v.get("momentum", 0.1), "affine": True}
    options["track_running_stats"] = tracked
    return getattr(nn, f"InstanceNorm{rank - 2}d"), {"num_features": v["weight"].numel(), **options}


def _prelu(v: dict[str, Any], rank: int | None) -> Made:
    return nn.PReLU, {"num_parameters": v["weight"].numel()}


def _bilinear(v: dict[str, Any], rank: int | None) -> Made:
    out_features, in1, in2 = v["weight"].shape
    options = {"in1_features": in1, "in2_features": in2, "bias": v.get("bias") is not None}
    return nn.Bilinear, {"out_features": out_features, **options}


def _experts(v: dict[str, Any], rank: int | None) -> Made:
    weight = v["weight"]
    if weight.dim() != 3 or rank not in (None, 2) or v.get("offs") is None:
        raise NotAModule
    if v.get("bias") is not None or v.get("out_dtype") is not None:
        raise NotAModule
    experts, in_features, out_features = weight.shape
    return Experts, {
        "experts": experts,
        "in_features": in_features,
        "out_features": out_features,
    }


_WB = ("weight", "bias")
_STATS = ("running_mean", "running_var")
_CONV = ("input", *_WB, "stride", "padding", "dilation", "groups")
_CONV_T = ("input", *_WB, "stride", "padding", "output_padding", "groups", "dilation")
_SPARSE = ("scale_grad_by_freq", "sparse")
_BAG_INPUTS = ("input", "offsets", "per_sample_weights")
_BAG = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse")
_NORM = ("input", "normalized_shape")
_GROUPS = ("input", "num_groups", *_WB, "eps")
_BN_SLOTS = (*_STATS, *_WB)
_IN_SLOTS = (*_WB, *_STATS)
_BN_OPTIONS = ("training", "momentum", "eps")
_IN_OPTIONS = ("use_input_stats", "momentum", "eps")
_PRELU = Form(("input", "weight"), ("weight",), _prelu)
_MATMUL = Matmul(("input", "weight"), ("weight",), _linear, spelled=(("other", "weight"), ("mat2", "weight")))
_ADDMM = Matmul(
    ("bias", "input", "weight", "beta", "alpha"),
    _WB,
    _linear,
    spelled=(("input", "bias"), ("mat1", "input"), ("mat2", "weight")),
)
_GROUPED = Form(
    ("input", "weight", "offs", "bias", "out_dtype"),
    ("weight",),
    _experts,
    inputs=("input", "offs"),
    spelled=(("mat_a", "input"), ("mat_b", "weight"), ("mat2", "weight")),
)
_GROUPED_MM = [getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)]  # not in every torch

# F.xxx, and, where torch.xxx is another function, its order of arguments
FORMS: dict[Any, Form] = {
    F.linear: Form(("input", *_WB), _WB, _linear),
    **{getattr(F, f"conv{d}d"): Form(_CONV, _WB, _conv(d, False)) for d in (1, 2, 3)},
    **{getattr(F, f"conv_transpose{d}d"): Form(_CONV_T, _WB, _conv(d, True)) for d in (1, 2, 3)},
    F.embedding: Form(
        ("input", "weight", "padding_idx", "max_norm", "norm_type", *_SPARSE), ("weight",), _embedding
    ),
    torch.embedding: Form(
        ("weight", "indices", "padding_idx", *_SPARSE), ("weight",), _embedding, inputs=("indices",)
    ),
    F.embedding_bag: Form(
        (*_BAG, "per_sample_weights", "include_last_offset", "padding_idx"),
        ("weight",),
        _embedding_bag,
        inputs=_BAG_INPUTS,
    ),
    F.layer_norm: Form((*_NORM, *_WB, "eps"), _WB, _layer_norm),
    torch.layer_norm: Form((*_NORM, *_WB, "eps", "cudnn_enable"), _WB, _layer_norm),
    F.rms_norm: Form((*_NORM, "weight", "eps"), ("weight",), _rms_norm),
    torch.rms_norm: Form((*_NORM, "weight", "eps"), ("weight",), _rms_norm),
    F.group_norm: Form(_GROUPS, _WB, _group_norm),
    torch.group_norm: Form((*_GROUPS, "cudnn_enabled"), _WB, _group_norm),
    F.batch_norm: Form(("input", *_BN_SLOTS, *_BN_OPTIONS), _BN_SLOTS, _batch_norm),
    torch.batch_norm: Form(("input", *_IN_SLOTS, *_BN_OPTIONS, "cudnn_enabled"), _BN_SLOTS, _batch_norm),
    F.instance_norm: Form(("input", *_BN_SLOTS, *_IN_OPTIONS), _IN_SLOTS, _instance_norm),
    torch.instance_norm: Form(
        ("input", *_IN_SLOTS, *_IN_OPTIONS, "cudnn_enabled"), _IN_SLOTS, _instance_norm
    ),
    **dict.fromkeys((F.prelu, torch.Tensor.prelu), _PRELU),
    F.bilinear: Form(("input1", "input2", *_WB), _WB, _bilinear, inputs=("input1", "input2")),
    **dict.fromkeys((operator.matmul, torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm), _MATMUL),
    **dict.fromkeys((torch.addmm, torch.Tensor.addmm), _ADDMM),
    **dict.fromkeys((grouped_mm, *filter(None, _GROUPED_MM)), _GROUPED),
}
