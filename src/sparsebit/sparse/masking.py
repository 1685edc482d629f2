"""The graph of a model with masked layers, and the way back: masks multiplied into an ordinary module."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from sparsebit.graph.ops import module_of
from sparsebit.sparse.channel_rules.pointwise import over_given_axes
from sparsebit.sparse.channel_rules.zeros import divisors
from sparsebit.sparse.modules import SparseOpr, sparse_module
from sparsebit.sparse.modules.base import mask_name
from sparsebit.sparse.modules.statistics import Statistic, as_statistic, statistics_of
from sparsebit.sparse.sparse_config import SparseConfig, resolve
from sparsebit.sparse.surgery import Cut

OVER_CHANNELS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)  # masked, also without weights
READ = "_read_mask"  # behind the name of a tensor that the graph reads: models have masks of their own


def with_masks(plain: fx.GraphModule, cfg: SparseConfig) -> fx.GraphModule:
    """The same graph over the same parameters; layers, and tensors that the graph reads by itself, have masks."""
    tensors = [*plain.parameters(), *plain.buffers()]
    gm = copy.deepcopy(plain, {id(t): t for t in tensors})
    gm.meta = dict(plain.meta)
    for node in gm.graph.nodes:
        if node.op == "call_module":
            for path in _layers(gm, str(node.target)):
                _mask_layer(gm, path, node, cfg)
    oprs, whole = oprs_of(gm), divisors(gm)
    for node in list(gm.graph.nodes):
        if node.op == "get_attr":
            _mask_read(gm, node, oprs, str(node.target) not in whole)
        elif over_given_axes(node, gm):
            as_statistic(gm, node)
    gm.graph.lint()
    gm.recompile()
    return gm


def _layers(gm: fx.GraphModule, path: str) -> Iterator[str]:
    """What is masked as one: a leaf of the graph, or the layers inside an island."""
    module = gm.get_submodule(path)
    if path in gm.meta.get("islands", {}) or "" in gm.meta.get("islands", {}):
        for name, inner in module.named_modules():
            if not list(inner.children()) and list(inner.parameters(recurse=False)):
                yield f"{path}.{name}".strip(".")
    elif list(module.parameters()) or isinstance(module, OVER_CHANNELS):
        yield path


def _mask_layer(gm: fx.GraphModule, path: str, node: fx.Node, cfg: SparseConfig) -> None:
    module = gm.get_submodule(path)
    if isinstance(module, SparseOpr):
        return  # called twice
    opr = sparse_module(module, None)
    opr.normed = len(node.users) == 1 and _is_norm(next(iter(node.users)), gm)
    opr.build_sparser(resolve(cfg.sparser, [node.name, path]))
    opr.train(module.training)
    owner, _, name = path.rpartition(".")
    setattr(gm.get_submodule(owner), name, opr)


def _is_norm(node: fx.Node, gm: fx.GraphModule) -> bool:
    return node.op == "call_module" and isinstance(module_of(node, gm), _NormBase)


def _mask_read(gm: fx.GraphModule, node: fx.Node, oprs: dict[str, Any], applied: bool) -> None:
    """A parameter or buffer that the graph reads by itself; that of a layer has the layer's mask."""
    path = str(node.target)
    opr, name = owner_of(path, oprs)
    if opr is not None:
        where = path.removesuffix(name) + mask_name(name)
    else:
        owner, _, name = path.rpartition(".")
        module = gm.get_submodule(owner)
        value = getattr(module, name)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        where = f"{owner}.{name}{READ}".lstrip(".")
        if f"{name}{READ}" not in module._buffers:
            ones = torch.ones(value.shape, dtype=torch.bool, device=value.device)
            module.register_buffer(f"{name}{READ}", ones)
    if not applied:
        return
    with gm.graph.inserting_after(node):
        mask = gm.graph.get_attr(where)
    with gm.graph.inserting_after(mask):
        product = gm.graph.call_function(operator.mul, (node, mask))
    node.replace_all_uses_with(product, delete_user_cb=lambda user: user is not product)


def oprs_of(model: nn.Module) -> dict[str, Any]:
    """The masked layers, by module path."""
    return {name: m for name, m in model.named_modules() if isinstance(m, SparseOpr)}


def owner_of(path: str, oprs: dict[str, Any]) -> tuple[Any, str]:
    """The masked layer that a parameter belongs to, and the parameter's name in it; None where there is none."""
    owner, _, name = path.rpartition(".")
    while owner and owner not in oprs:
        owner, _, last = owner.rpartition(".")
        name = f"{last}.{name}"
    opr = oprs.get(owner)
    return (opr, name) if opr is not None and name in opr.layer_parameters() else (None, path)


def mask_at(model: nn.Module, path: str, oprs: dict[str, Any]) -> Tensor | None:
    """The mask of the parameter or buffer at `path`, if it has one."""
    opr, name = owner_of(path, oprs)
    if opr is not None:
        return opr.mask_of(name)
    owner, _, last = path.rpartition(".")
    return model.get_submodule(owner)._buffers.get(f"{last}{READ}")


def set_masks(model: fx.GraphModule, cut: Cut) -> None:
    """Where classes go, parameters are masked, and statistics are over what stays."""
    oprs, statistics = oprs_of(model), statistics_of(model)
    reset_masks(model)
    for part in cut.walk.slices.values():
        mask = mask_at(model, part.path, oprs)
        if mask is not None:
            line = [-1 if d == part.axis else 1 for d in range(mask.dim())]
            mask &= cut.keeps(part.labels).view(line).to(mask.device)
    for path, labels in cut.walk.normed.items():
        oprs[path].kept.copy_(cut.keeps(labels))
    for name, labels in cut.walk.statistics.items():
        statistics[name].set(cut.keeps(labels))


def reset_masks(model: nn.Module) -> None:
    """Nothing goes."""
    for opr in oprs_of(model).values():
        opr.reset_masks()
    for module in model.modules():
        if isinstance(module, Statistic):
            module.set(torch.ones_like(module.kept))
    for name, buffer in model.named_buffers():
        if name.endswith(READ):
            buffer.fill_(True)


@torch.no_grad()
def bake(model: fx.GraphModule, target: nn.Module) -> list[str]:
    """Give `target`, which has the module paths of `model`, its weights of now, masked and gated.

    Returns the weights that `target` has no place for.
    """
    new: dict[int, nn.Parameter] = {}
    homeless = []
    oprs, places = oprs_of(model), dict(target.named_modules())
    whole = divisors(model)
    for path, p in model.named_parameters(remove_duplicate=False):
        owner, _, name = path.rpartition(".")
        if owner not in places or name not in places[owner]._parameters:
            if ".sparser." not in path:  # gates
                homeless.append(path)
            continue
        opr, inner = owner_of(path, oprs)
        mask = None if path in whole else mask_at(model, path, oprs)
        value = opr.masked(inner) if opr is not None else p if mask is None else p * mask
        new.setdefault(id(p), nn.Parameter(value.detach().clone(), p.requires_grad))
        places[owner]._parameters[name] = new[id(p)]
    for path, b in model.named_buffers(remove_duplicate=False):
        owner, _, name = path.rpartition(".")
        if owner in places and name in places[owner]._buffers:
            mask = None if path in whole else mask_at(model, path, oprs)
            places[owner]._buffers[name] = b.detach().clone() if mask is None else b.detach() * mask
    for place in places.values():
        if isinstance(place, nn.RNNBase):
            place._flat_weights = [place._parameters[n] for n in place._flat_weights_names]
    return homeless
