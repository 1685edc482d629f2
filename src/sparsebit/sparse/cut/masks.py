"""Put masks on the layers of a graph, read a cut from them, and multiply them into an ordinary module."""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from sparsebit.errors import SparsebitError
from sparsebit.graph.ops import module_of
from sparsebit.graph.trace import own_copy
from sparsebit.sparse.cut.surgery import Cut
from sparsebit.sparse.labels.rules.pointwise import over_given_axes
from sparsebit.sparse.labels.rules.stays_zero import divisors
from sparsebit.sparse.labels.walk import Walk
from sparsebit.sparse.modules import SparseOpr, sparse_module
from sparsebit.sparse.modules.base import mask_name
from sparsebit.sparse.modules.statistics import Statistic, as_statistic, statistics_of
from sparsebit.sparse.sparse_config import SparseConfig, resolve, unmatched
from sparsebit.sparse.trace.attention import OPEN
from sparsebit.sparse.trace.names import Finder, fx_name, inside_of_whole

log = logging.getLogger("sparsebit")
OVER_CHANNELS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)  # masked even without weights
# suffix for a tensor that the graph reads: models may have attributes that end in `_mask`
READ = "_read_mask"


def put_masks(gm: fx.GraphModule) -> None:
    """Mask the layers, and the tensors that the graph reads without a layer. The parameters stay the same
    objects."""
    for node in gm.graph.nodes:
        if node.op == "call_module":
            for path in _layers(gm, str(node.target)):
                _mask_layer(gm, path, node)
    oprs = oprs_of(gm)
    whole = divisors(gm)
    for node in list(gm.graph.nodes):
        if node.op == "get_attr":
            _mask_read(gm, node, oprs, str(node.target) not in whole)
        elif over_given_axes(node, gm):
            as_statistic(gm, node)
    gm.graph.lint()
    gm.recompile()


def _layers(gm: fx.GraphModule, path: str) -> Iterator[str]:
    """The units that get masks: a leaf of the graph, or the layers inside an island."""
    module = gm.get_submodule(path)
    if path in gm.meta.get("islands", {}) or "" in gm.meta.get("islands", {}):
        yield from _inside(module, path)
    elif list(module.parameters()) or isinstance(module, OVER_CHANNELS):
        yield path


def _inside(module: nn.Module, path: str) -> Iterator[str]:
    """The layers to mask in a module. torch's attention blocks read the weights of their layers without a
    call, so such a block is one unit."""
    if type(module) in OPEN or not list(module.children()):
        if list(module.parameters()):
            yield path
        return
    for name, child in module.named_children():
        yield from _inside(child, f"{path}.{name}".strip("."))


def _mask_layer(gm: fx.GraphModule, path: str, node: fx.Node) -> None:
    module = gm.get_submodule(path)
    if isinstance(module, SparseOpr):
        return  # the layer is called twice
    opr = sparse_module(module)
    opr.normed = len(node.users) == 1 and _is_norm(next(iter(node.users)), gm)
    opr.train(module.training)
    owner, _, name = path.rpartition(".")
    setattr(gm.get_submodule(owner), name, opr)


def _is_norm(node: fx.Node, gm: fx.GraphModule) -> bool:
    return node.op == "call_module" and isinstance(module_of(node, gm), _NormBase)


def _mask_read(gm: fx.GraphModule, node: fx.Node, oprs: dict[str, Any], applied: bool) -> None:
    """Mask a parameter or buffer that the graph reads. A parameter of a layer has the mask of the layer."""
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


def build_sparsers(gm: fx.GraphModule, cfg: SparseConfig) -> None:
    """Give every masked layer its sparser. SPECIFIC may name a layer by fx name or by module path."""
    for path, (opr, names) in layer_names(gm).items():
        section = resolve(cfg.sparser, [path, *names])
        opr.build_sparser(cfg.model_copy(update={"sparser": section}))


def warn_of_unmatched(gm: fx.GraphModule, cfg: SparseConfig) -> None:
    names: list[str] = []
    for path, (_, others) in layer_names(gm).items():
        names.extend((path, *others))
    names += [n for node in gm.graph.nodes for n in (node.name, str(node.target))]
    missed = unmatched(cfg.sparser, names)
    if missed:
        log.warning("SPARSER.SPECIFIC: no layer is called %s", " or ".join(missed))


def layer_names(gm: fx.GraphModule) -> dict[str, tuple[Any, list[str]]]:
    """For each path, the masked layer and its other names."""
    calls: dict[str, list[str]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node.name)
    return {path: (opr, [*calls.get(path, ())[:1], fx_name(path)]) for path, opr in oprs_of(gm).items()}


def oprs_of(model: nn.Module) -> dict[str, Any]:
    """The masked layers, by module path."""
    return {inside_of_whole(name): m for name, m in model.named_modules() if isinstance(m, SparseOpr)}


def owner_of(path: str, oprs: dict[str, Any]) -> tuple[Any, str]:
    """The masked layer of a parameter, and the name of the parameter in it; None if there is no such layer."""
    owner, _, name = path.rpartition(".")
    while owner and owner not in oprs:
        owner, _, last = owner.rpartition(".")
        name = f"{last}.{name}"
    opr = oprs.get(owner)
    if opr is not None and name in opr.layer_parameters():
        return opr, name
    return None, path


def mask_at(model: nn.Module, path: str, oprs: dict[str, Any]) -> Tensor | None:
    """The mask of the parameter or buffer at `path`, if it has one."""
    opr, name = owner_of(path, oprs)
    if opr is not None:
        mask: Tensor | None = opr._buffers.get(mask_name(name))
        return mask
    owner, _, last = path.rpartition(".")
    return model.get_submodule(owner)._buffers.get(f"{last}{READ}")


def without_masks(model: fx.GraphModule, walk: Walk) -> Tensor:
    """Classes that are kept because one of their tensors cannot be masked: it belongs to an unknown layer, or
    to an island."""
    oprs = oprs_of(model)
    statistics = statistics_of(model)
    by_themselves = {path for path, opr in oprs.items() if opr.masks_itself}
    read = {str(node.target) for node in walk.gm.graph.nodes if node.op == "get_attr"}
    stay = []
    for part in walk.slices.values():
        if (
            (part.path in read or isinstance(walk.tensor(part.path), nn.Parameter))
            and mask_at(model, part.path, oprs) is None
            and part.path.rpartition(".")[0] not in by_themselves
        ):
            stay.append(part.labels)
    stay += [labels for path, labels in walk.normed.items() if not hasattr(oprs.get(path), "kept")]
    stay += [labels for name, labels in walk.statistics.items() if name not in statistics]
    return walk.labels.roots(torch.cat([torch.zeros(0, dtype=torch.long), *map(Tensor.flatten, stay)]))


def set_masks(model: fx.GraphModule, cut: Cut) -> None:
    """Mask the parameters where classes are removed. Norms take their statistics from the kept channels."""
    oprs = oprs_of(model)
    statistics = statistics_of(model)
    reset_masks(model)
    for part in cut.walk.slices.values():
        mask = mask_at(model, part.path, oprs)
        if mask is not None:
            line = []
            for d in range(mask.dim()):
                line.append(-1 if d == part.axis else 1)
            mask.logical_and_(cut.keeps(part.labels).view(line).to(mask.device))
    for path, labels in cut.walk.normed.items():
        if hasattr(oprs.get(path), "kept"):
            oprs[path].kept.copy_(cut.keeps(labels))
    for name, labels in cut.walk.statistics.items():
        if name in statistics:
            statistics[name].set(cut.keeps(labels))


def cut_by_masks(model: fx.GraphModule, walk: Walk) -> Cut:
    """The cut that the masks describe: a class is removed if every parameter with that class is masked there."""
    n = len(walk.labels)
    oprs = oprs_of(model)
    gone = torch.zeros(n, dtype=torch.bool)
    stays = torch.zeros(n, dtype=torch.bool)
    for part in walk.slices.values():
        mask = mask_at(model, part.path, oprs)
        if mask is not None:
            left = mask.cpu().bool().movedim(part.axis, 0)
            if left.dim() > 1:
                left = left.flatten(1).any(1)
            roots = walk.labels.roots(part.labels)
            gone[roots[~left]] = True
            stays[roots[left]] = True
    return Cut(walk, (gone & ~stays).nonzero().flatten())


def reset_masks(model: nn.Module) -> None:
    """Remove all masks."""
    for opr in oprs_of(model).values():
        opr.reset_masks()
    for module in model.modules():
        if isinstance(module, Statistic):
            module.set(torch.ones_like(module.kept))
    for name, buffer in model.named_buffers():
        if name.endswith(READ):
            buffer.fill_(True)


@torch.no_grad()
def bake(model: fx.GraphModule, target: nn.Module, tied: bool = True) -> list[str]:
    """Write the current weights of `model`, masked and gated, into `target`, which has the same layers.

    tied   True: a weight of two layers stays one. False: it becomes two where the masks differ.
    Returns the weights that have no place in `target`.
    """
    new: dict[int, list[nn.Parameter]] = {}
    homeless = []
    oprs = oprs_of(model)
    places = _Places(target)
    whole = divisors(model)
    for path, p in model.named_parameters(remove_duplicate=False):
        store, name = places.find(path, "_parameters")
        if store is None:
            if ".sparser." not in path:  # gates
                homeless.append(path)
            continue
        opr, inner = owner_of(inside_of_whole(path), oprs)
        if path in whole:
            mask = None
        else:
            mask = mask_at(model, path, oprs)
        value = p if mask is None else p * mask
        value = (value if opr is None else opr.masked(inner)).detach()
        made = new.setdefault(id(p), [])
        same = next((other for other in made if tied or torch.equal(other, value)), None)
        if same is None:
            same = nn.Parameter(value.clone(), p.requires_grad)
            made.append(same)
        store[name] = same
    for path, b in model.named_buffers(remove_duplicate=False):
        store, name = places.find(path, "_buffers")
        if store is not None:
            if path in whole:
                mask = None
            else:
                mask = mask_at(model, path, oprs)
            if mask is None:
                store[name] = b.detach().clone()
            else:
                store[name] = b.detach() * mask
    for place in target.modules():
        if isinstance(place, nn.RNNBase):
            place._flat_weights = [place._parameters[n] for n in place._flat_weights_names]
    return homeless


def baked(model: fx.GraphModule, source: nn.Module, plain: fx.GraphModule, kind: str) -> nn.Module:
    """A copy of the user's model with the current weights; a copy of its graph if the user's code holds
    weights itself."""
    tied = kind == "structured"
    own = own_copy(source)
    if not bake(model, own, tied):
        return own
    graph = copy.deepcopy(plain)
    homeless = bake(model, graph, tied)
    if homeless:
        raise SparsebitError(
            f"compact: the original model has no place for {homeless[0]}; keep the names of its layers and of "
            f"their parameters in your own layers"
        )
    return graph


class _Places:
    """Finds the tensors of a graph in another model, under the same path or another spelling of it."""

    def __init__(self, target: nn.Module):
        self.modules = dict(target.named_modules())
        self.finder = Finder(self.modules)

    def find(self, path: str, store: str) -> tuple[dict[str, Any] | None, str]:
        owner, _, name = path.rpartition(".")
        home: str | None = owner
        if owner not in self.modules:
            home = self.finder.find(owner)
        if home is None:
            found = None
        else:
            found = vars(self.modules[home])[store]
        if found is not None and name in found:
            return found, name
        return None, name
