"""Layers with weights: they read labels on one side of the weight and make new labels on the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from sparsebit.sparse.labels.rules import channel_rule

if TYPE_CHECKING:
    from sparsebit.sparse.labels.walk import Walk


def _out(walk: Walk, node: fx.Node, n: int, axis: int) -> tuple[Tensor, Tensor]:
    """The labels that a layer makes. A layer that is called twice makes the same labels twice."""
    known = walk.known(f"{node.target}.weight", 1 if _transposed(walk.module(node)) else 0)
    if known is not None:
        return known.labels, walk.spread(node, known.labels, axis)
    return walk.make(node, n, axis)


def _transposed(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvTransposeNd)


@channel_rule(nn.modules.conv._ConvNd)
def conv(walk: Walk, node: fx.Node, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    module = walk.module(node)
    path = str(node.target)
    if input.dim() != module.weight.dim():
        return NotImplemented  # an input without a batch
    if not {*walk.labels.varies(input)} <= {1}:
        walk.fix(input, node, "works along an axis of channels")
    ins = walk.labels.along(input, 1)
    groups = module.groups
    o, i = (1, 0) if _transposed(module) else (0, 1)
    if groups > 1 and module.in_channels == groups:
        return _depthwise(walk, node, module, ins, o)
    if groups > 1:  # the same position of every group is removed, so groups stay equally large
        walk.labels.join(ins.view(groups, -1), ins.view(groups, -1)[:1])
    outs, out = _out(walk, node, module.out_channels, 1) if groups == 1 else _grouped(walk, node, module)
    # the positions of axis 1 of the weight
    one_group = {o: outs.view(groups, -1)[0], i: ins.view(groups, -1)[0]}
    walk.slice(f"{path}.weight", o, one_group[o] if o else outs, produces=True)
    walk.slice(f"{path}.weight", i, one_group[i] if i else ins)
    walk.size(path, "in_channels", ins)
    _bias(walk, node, module, outs)
    walk.size(path, "out_channels", outs)
    return out


def _grouped(walk: Walk, node: fx.Node, module: Any) -> tuple[Tensor, Tensor]:
    outs, out = walk.make(node, module.out_channels, 1)
    walk.labels.join(outs.view(module.groups, -1), outs.view(module.groups, -1)[:1])
    known = walk.known(f"{node.target}.weight", 0)
    if known is not None and not _transposed(module):
        walk.labels.join(known.labels, outs)
    return outs, out


def _depthwise(walk: Walk, node: fx.Node, module: Any, ins: Tensor, o: int) -> Tensor:
    """Every input channel has its filters, which depend on it."""
    path = str(node.target)
    times = module.out_channels // module.groups
    outs = ins.repeat_interleave(times)
    walk.slice(f"{path}.weight", 0, ins if o else outs)
    _bias(walk, node, module, outs)
    for attribute, labels in (("in_channels", ins), ("groups", ins), ("out_channels", outs)):
        walk.size(path, attribute, labels)
    return walk.spread(node, outs, 1)


def _bias(walk: Walk, node: fx.Node, module: Any, labels: Tensor) -> None:
    if module.bias is not None:
        walk.slice(f"{node.target}.bias", 0, labels)


@channel_rule(nn.Linear)
def linear(walk: Walk, node: fx.Node, input: Tensor) -> Any:
    module = walk.module(node)
    path = str(node.target)
    axes = walk.labels.varies(input)
    if axes and input.dim() - 1 not in axes:  # the layer works along another axis than the channels
        walk.keep(node, "works along another axis than that of the channels")
        return input[..., :1].expand(walk.values[node].shape)
    ins = walk.labels.along(input, -1)
    outs, out = _out(walk, node, module.out_features, -1)
    walk.slice(f"{path}.weight", 0, outs, produces=True)
    walk.slice(f"{path}.weight", 1, ins)
    _bias(walk, node, module, outs)
    walk.size(path, "in_features", ins)
    walk.size(path, "out_features", outs)
    return out


@channel_rule(F.linear)
def linear_function(
    walk: Walk, node: fx.Node, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Any:
    """A bias may be computed (`cat` of biases). Other linear functions are modules at this point."""
    if len(node.args) > 1:
        source = node.args[1]
    else:
        source = node.kwargs["weight"]
    if not isinstance(source, fx.Node) or walk.of[source] is not None:
        return NotImplemented  # the weight is computed
    path = str(source.target)
    known = walk.known(str(source.target), 0)
    if known is None:
        outs = walk.labels.fresh(len(weight))
    else:
        outs = known.labels
    walk.slice(path, 0, outs, produces=True)
    walk.slice(path, 1, walk.labels.along(input, -1))
    if bias is not None:
        walk.labels.join(bias, outs)
    return walk.spread(node, outs, -1)


def reads_weight(node: fx.Node, weight: fx.Node) -> bool:
    """Is the only use of `weight` that of a linear function?"""
    args = [*node.args, *node.kwargs.values()]
    is_weight = node.kwargs.get("weight", node.args[1] if len(node.args) > 1 else None) is weight
    return node.target is F.linear and is_weight and args.count(weight) == 1


@channel_rule(nn.Embedding, nn.EmbeddingBag)
def embedding(walk: Walk, node: fx.Node, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    module = walk.module(node)
    path = str(node.target)
    if module.max_norm is not None:
        return NotImplemented  # rows are scaled by their norm
    walk.slice(f"{path}.weight", 0, torch.zeros(module.num_embeddings, dtype=torch.long))
    known = walk.known(f"{path}.weight", 1)
    if known is None:
        outs, out = walk.make(node, module.embedding_dim, -1)
        walk.slice(f"{path}.weight", 1, outs, produces=True)
        walk.size(path, "embedding_dim", outs)
        return out
    return walk.spread(node, known.labels, -1)


@channel_rule(_NormBase)
def batch_norm(walk: Walk, node: fx.Node, input: Tensor) -> Any:
    module = walk.module(node)
    path = str(node.target)
    if input.dim() < 2:
        return NotImplemented
    if input.shape[1] != module.num_features and module.num_features:
        return NotImplemented  # an input without a batch
    labels = walk.labels.along(input, 1)
    for name in ("weight", "bias", "running_mean", "running_var"):
        if getattr(module, name, None) is not None:
            walk.slice(f"{path}.{name}", 0, labels)
    walk.size(path, "num_features", labels)
    return input


@channel_rule(nn.LayerNorm, nn.RMSNorm)
def layer_norm(walk: Walk, node: fx.Node, input: Tensor) -> Any:
    """A cut along the normalized axis: the statistics are then those of the channels that are left."""
    module = walk.module(node)
    path = str(node.target)
    over = range(input.dim() - len(module.normalized_shape), input.dim())
    if not {*over} & walk.settle_heads(input, over):
        return input
    if len(over) > 1:
        return NotImplemented
    labels = walk.labels.along(input, -1)
    for name in ("weight", "bias"):
        if getattr(module, name, None) is not None:
            walk.slice(f"{path}.{name}", 0, labels)
    walk.size(path, "normalized_shape", labels)
    _over_kept(walk, path, labels)
    return input


def _over_kept(walk: Walk, path: str, labels: Tensor) -> None:
    """Mark a norm. One without weights that is called twice has no other record that it is the same norm."""
    walk.labels.join(walk.normed.setdefault(path, labels), labels)


@channel_rule(nn.GroupNorm)
def group_norm(walk: Walk, node: fx.Node, input: Tensor) -> Any:
    """Whole groups are removed, so the statistics of the other groups do not change. With one group it is a
    layer norm."""
    module = walk.module(node)
    path = str(node.target)
    labels = walk.labels.along(input, 1)
    groups = labels.view(module.num_groups, -1)
    if module.num_groups > 1:
        walk.labels.join(groups, groups[:, :1])
    else:
        _over_kept(walk, path, labels)
    for name in ("weight", "bias"):
        if getattr(module, name) is not None:
            walk.slice(f"{path}.{name}", 0, labels)
    walk.size(path, "num_channels", labels)
    if module.num_groups > 1:
        walk.size(path, "num_groups", groups[:, 0])
    return input


@channel_rule(nn.PReLU)
def prelu(walk: Walk, node: fx.Node, input: Tensor) -> Any:
    module = walk.module(node)
    if module.num_parameters > 1:
        labels = walk.labels.along(input, 1)
        walk.slice(f"{node.target}.weight", 0, labels)
        walk.size(str(node.target), "num_parameters", labels)
    return input
