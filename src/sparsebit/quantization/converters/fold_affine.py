"""fold_affine: a product with a constant, or the sum with one, becomes part of the weights beside it.

Behind a convolution, a linear layer or a batch norm, `y * a + b` scales the weight and shifts the bias. In front of
convolutions and linear layers a number can scale their weights. Models that come from ONNX files, and layers with a
learned scale (LayerScale, learnable affine blocks), have many of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.graph.ops import called_module, inputs_of, is_bookkeeping, module_calls, name_of, writes_input
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.simplify.constant_operands import constant_tensor
from sparsebit.graph.simplify.settle_ranks import is_float
from sparsebit.graph.trace.tracer import forward_owner

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
LAYERS = (*CONVS, *TRANSPOSED, *NORMS, nn.Linear)
READERS = (*CONVS, nn.Linear)
KINDS = {
    **dict.fromkeys(("mul", "multiply"), "mul"),
    **dict.fromkeys(("div", "truediv", "divide", "true_divide"), "div"),
    **dict.fromkeys(("add",), "add"),
    **dict.fromkeys(("sub", "subtract"), "sub"),
}


@dataclass
class Affine:
    """`source * scale + shift`, as one node computes it; both are constants."""

    node: fx.Node
    source: fx.Node
    scale: Tensor
    shift: Tensor

    @property
    def is_scale(self) -> bool:
        return not bool(self.shift.any())


def _wanted(config: Any) -> bool:
    schedule = config.schedule
    return bool(schedule.fuse_bn and not schedule.bn_tuning and schedule.enabled("fold_affine"))


@graph_pass("fold_affine", when=_wanted, keeps_output=True)
def fold_affine(gm: fx.GraphModule, ctx: Any = None) -> int:
    folded = 0
    for node in list(gm.graph.nodes):
        found = read_affine(node, gm)
        if found is not None and (_is_neutral(found, gm) or _fold_back(found, gm)):
            node.replace_all_uses_with(found.source)
            node.args = ()  # it is not a reader any more
            folded += 1
    for node in reversed(list(gm.graph.nodes)):
        found = read_affine(node, gm)
        if found is not None and found.is_scale and _fold_ahead(found, gm):
            folded += 1
    return folded


def read_affine(node: fx.Node, gm: fx.GraphModule) -> Affine | None:
    """The factor or summand of the node, if one of its two operands is a constant."""
    kind = None
    if node.op in ("call_function", "call_method"):
        kind = KINDS.get(name_of(node))
    if kind is None or node.kwargs or len(node.args) != 2 or writes_input(node, gm) or not node.users:
        return None
    first, second = node.args
    if constant_tensor(second, gm) is not None:
        source = first
        other = constant_tensor(second, gm)
    elif kind in ("mul", "add"):
        source = second
        other = constant_tensor(first, gm)
    else:
        return None
    if other is None or not isinstance(source, fx.Node) or constant_tensor(source, gm) is not None:
        return None
    one = torch.ones((), dtype=torch.float64)
    if kind in ("mul", "div"):
        scale = other if kind == "mul" else 1 / other
        found = Affine(node, source, scale, one * 0)
    else:
        found = Affine(node, source, one, other if kind == "add" else -other)
    usable = found.scale.isfinite().all() and found.shift.isfinite().all() and (found.scale != 0).all()
    return found if bool(usable) else None


def _is_neutral(found: Affine, gm: fx.GraphModule) -> bool:
    """`x * 1` or `x + 0`, as numbers that change neither the shape nor the type."""
    numbers = found.scale.dim() == found.shift.dim() == 0 or found.scale.numel() == found.shift.numel() == 1
    if not numbers or max(found.scale.dim(), found.shift.dim()) > 1 or not is_float(found.source, gm):
        return False
    return found.is_scale and bool(found.scale == 1)


def _fold_back(found: Affine, gm: fx.GraphModule) -> bool:
    """Into the layer that computes the value, if nothing else reads it."""
    source = found.source
    node = found.node
    layer = _layer(source, gm, LAYERS)
    readers = [user for user in source.users if not is_bookkeeping(user)]
    if layer is None or readers != [node]:
        return False
    if isinstance(layer, NORMS) and (not layer.affine or layer.running_var is None):
        return False
    channels = _channels(layer)
    scale = _per_channel(found.scale, channels, layer)
    shift = _per_channel(found.shift, channels, layer)
    if scale is None or shift is None:
        return False
    _change(layer, scale, shift)
    return True


def _layer(node: fx.Node, gm: fx.GraphModule, kinds: tuple[type[nn.Module], ...]) -> Any:
    """The layer that the node calls, if no other node calls it and its forward is torch's own."""
    module = called_module(node, gm)
    if not isinstance(module, kinds) or module_calls(gm)[str(node.target)] > 1:
        return None
    if forward_owner(type(module)) not in (*kinds, *(kind.__mro__[1] for kind in NORMS)):
        return None
    is_computed = hasattr(module, "parametrizations") or module._forward_hooks or module._forward_pre_hooks
    return None if is_computed else module


def _channels(layer: Any) -> int:
    if isinstance(layer, nn.Linear):
        return int(layer.out_features)
    return int(layer.num_features if isinstance(layer, NORMS) else layer.out_channels)


def _per_channel(value: Tensor, channels: int, layer: nn.Module) -> Tensor | None:
    """One entry per output channel, if `value` is spread over them and over nothing else."""
    behind = 0  # axes behind the channels
    for kinds, axes in (
        ((nn.Conv1d, nn.ConvTranspose1d), 1),
        ((nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d), 2),
    ):
        behind = axes if isinstance(layer, kinds) else behind
    if isinstance(layer, (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d)):
        behind = 3
    rank = behind + 2
    if value.numel() == 1 and value.dim() <= rank:
        return value.reshape(1).expand(channels)
    if isinstance(layer, nn.BatchNorm1d):
        return None  # with two axes or with three
    shape = [1] * (value.dim() - 1 - behind) + [channels] + [1] * behind
    fits = value.dim() > behind and value.dim() <= rank and list(value.shape) == shape
    if isinstance(layer, nn.Linear):
        fits = value.shape[-1:] == (channels,) and value.numel() == channels and value.dim() <= 2
    return value.reshape(-1) if fits else None


@torch.no_grad()
def _change(layer: Any, scale: Tensor, shift: Tensor) -> None:
    """Make the layer compute `layer(x) * scale + shift`. New parameters: others may share the old ones."""
    weight = layer.weight
    bias = layer.bias
    factor = scale.to(weight.device)
    # (in, out / groups, ...): group g of the inputs makes group g of the outputs
    if isinstance(layer, TRANSPOSED):
        parts = weight.double().unflatten(0, (layer.groups, -1))
        per_group = factor.reshape(layer.groups, 1, -1, *[1] * (weight.dim() - 2))
        new = (parts * per_group).flatten(0, 1)
    else:
        new = weight.double() * factor.reshape(-1, *[1] * (weight.dim() - 1))
    layer.weight = nn.Parameter(new.to(weight.dtype), requires_grad=weight.requires_grad)
    moved = shift.to(weight.device)
    if bias is not None:
        moved = bias.double() * factor + moved
    if bias is not None or bool(moved.any()):
        layer.bias = nn.Parameter(moved.to(weight.dtype), requires_grad=weight.requires_grad)


def _fold_ahead(found: Affine, gm: fx.GraphModule) -> bool:
    """A number into the weights of the layers that read the product, also from behind the sum with a constant."""
    node = found.node
    end = found.node
    if found.scale.numel() != 1 or found.scale.dim() > 4:
        return False
    readers = [user for user in node.users if not is_bookkeeping(user)]
    shifted = read_affine(readers[0], gm) if len(readers) == 1 else None
    if shifted is not None and bool((shifted.scale == 1).all()):
        end = shifted.node
        readers = [user for user in end.users if not is_bookkeeping(user)]
    else:
        shifted = None
    layers = [_layer(user, gm, READERS) for user in readers]
    if not layers or any(layer is None for layer in layers):
        return False
    if any(inputs_of(user) != [end] for user in readers):
        return False
    if shifted is not None and not _divide_constant(shifted, float(found.scale), gm):
        return False
    for layer in layers:
        new = layer.weight.detach().double() * float(found.scale)
        layer.weight = nn.Parameter(new.to(layer.weight.dtype), requires_grad=layer.weight.requires_grad)
    node.replace_all_uses_with(found.source)
    node.args = ()
    return True


def _divide_constant(shifted: Affine, by: float, gm: fx.GraphModule) -> bool:
    """`x * by + shift` reads `x + shift / by` from now on, before the product with `by`."""
    shift = shifted.shift / by
    if not bool(shift.isfinite().all()) or float(shift.abs().max()) > 1e4:
        return False
    constant: Any = float(shift) if shift.dim() == 0 else None
    if constant is None:
        from sparsebit.graph.rewrite import fresh_name

        name = fresh_name(gm, "folded_constant")
        gm.register_buffer(name, shift.float())
        with gm.graph.inserting_before(shifted.node):
            constant = gm.graph.get_attr(name)
    shifted.node.args = (shifted.source, constant)
    shifted.node.op = "call_function"
    shifted.node.target = torch.add
    return True
