"""The user's model and the graph of a SparseModel hold the same parameters and buffers.

A trace works on a copy of the model. Afterwards the graph gets the tensors of the model in place of the
copies, so training one trains the other. Links tell which tensor of the graph is which tensor of the model,
by path.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.sparse.trace.names import inside_of_whole

log = logging.getLogger("sparsebit")
STORES = ("_parameters", "_buffers")


@dataclass(frozen=True)
class Link:
    """A tensor of the model by its path. The graph has all of it, or a part (query, key, value) by size and
    offset."""

    path: str
    part: tuple[torch.Size, tuple[int, ...], int] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The linked part of `tensor`, in the same memory."""
        if self.part is None:
            return tensor
        size, stride, offset = self.part
        return tensor.detach().as_strided(size, stride, tensor.storage_offset() + offset)


Links = dict[str, Link]  # by the path of the tensor in the graph


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers. A tensor with several paths comes several times."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


class Origins:
    """Which tensor of a new trace is a copy of which tensor of the model. Passes may move tensors afterwards."""

    def __init__(self, gm: nn.Module, model: nn.Module):
        theirs = dict(named_tensors(model))
        self.copies: dict[int, tuple[Tensor, Link]] = {}  # by identity
        self.memory: dict[int, tuple[Tensor, Link]] = {}  # by the address of the memory
        for path, tensor in named_tensors(gm):
            home = inside_of_whole(path)
            if home not in theirs:
                home = home.removeprefix("0.")  # a model of a single layer was put into a list
            if home in theirs and _alike(theirs[home], tensor):
                self.copies[id(tensor)] = (tensor, Link(home))
                self.memory.setdefault(_address(tensor), (tensor, Link(home)))

    def links(self, gm: nn.Module) -> Links:
        found = {path: self._link(tensor) for path, tensor in named_tensors(gm)}
        return {path: link for path, link in found.items() if link is not None}

    def _link(self, tensor: Tensor) -> Link | None:
        if id(tensor) in self.copies:
            return self.copies[id(tensor)][1]
        if tensor.is_meta or not tensor.numel():
            known = None
        else:
            known = self.memory.get(_address(tensor))
        if known is None:
            return None
        whole, link = known
        offset = int(tensor.storage_offset() - whole.storage_offset())
        return Link(link.path, (tensor.shape, tensor.stride(), offset))


def _alike(theirs: Tensor, tensor: Tensor) -> bool:
    return (
        theirs.shape == tensor.shape and theirs.stride() == tensor.stride() and theirs.dtype == tensor.dtype
    )


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def share(gm: nn.Module, model: nn.Module, origins: Origins) -> None:
    """Give the graph the tensors of the model; warn about parameters without a counterpart."""
    links = origins.links(gm)
    apart = [path for path, _ in gm.named_parameters() if path not in links]
    if apart:
        log.warning(
            "SparseModel: trains parameters (%s) that your model computes from others; your model "
            "does not follow there, take the trained one from smodel.compact()",
            ", ".join(apart[:3]) + f" and {len(apart) - 3} more" * (len(apart) > 3),
        )
    connect(gm, model, links)


def links_between(gm: nn.Module, model: nn.Module) -> Links:
    """The links of all tensors that both have."""
    return Origins(model, model).links(gm)


def connect(gm: nn.Module, model: nn.Module, links: Links) -> None:
    """Give the graph the tensors of the model."""
    mine = dict(named_tensors(gm))
    theirs = dict(named_tensors(model))
    new: dict[int, Tensor] = {}
    for path, link in links.items():
        old = mine[path]
        tensor = link.of(theirs[link.path])
        if link.part is not None and isinstance(old, nn.Parameter):
            tensor = nn.Parameter(tensor, old.requires_grad)
        new.setdefault(id(old), tensor)
    _replace(gm, new)


@torch.no_grad()
def follow(gm: nn.Module, model: nn.Module, links: Links) -> None:
    """Give the model the tensors of the graph, after a move to another device or a load."""
    mine = dict(named_tensors(gm))
    theirs = dict(named_tensors(model))
    new: dict[int, Tensor] = {}
    for path, link in links.items():
        now = mine.get(path)
        old = theirs.get(link.path)
        if now is None or old is None:
            continue  # the user has changed one of them since
        if link.part is None:
            new[id(old)] = now
            continue
        if (old.device, old.dtype) != (now.device, now.dtype):
            old.data = old.data.to(now.device, now.dtype)
        place = link.of(old)
        if place.data_ptr() != now.data_ptr():
            place.copy_(now)
            now.data = place
    _replace(model, new)


def part(model: nn.Module, links: Links, what: str) -> None:
    """Give the model other tensors with the same values; the graph keeps the shared ones, which optimizers
    know."""
    log.warning(
        "%s sets weights: from here on the SparseModel has separate weights, and the model that it was made of keeps "
        "those of now; take the result from smodel.compact()",
        what,
    )
    theirs = dict(named_tensors(model))
    shared = [theirs[link.path] for link in links.values() if link.path in theirs]
    own = lambda t: copy.deepcopy(t) if isinstance(t, nn.Parameter) else t.detach().clone()
    _replace(model, {id(t): own(t) for t in shared})


def copies(model: nn.Module, copied: nn.Module) -> dict[int, Tensor]:
    """For copy.deepcopy: a tensor of the model becomes the matching tensor of its copy."""
    theirs = dict(named_tensors(copied))
    return {id(tensor): theirs[path] for path, tensor in named_tensors(model) if path in theirs}


def copy_over_same(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph and its modules, over the same tensors."""
    made = copy.deepcopy(gm, {id(t): t for _, t in named_tensors(gm)})
    made.meta = dict(gm.meta)
    return made


def own_memory(gm: nn.Module) -> None:
    """Copy parameters that are parts of another parameter's memory."""
    _replace(
        gm, {id(p): copy.deepcopy(p) for p in gm.parameters() if p.untyped_storage().nbytes() > p.nbytes}
    )


def _replace(model: nn.Module, new: Mapping[int, Tensor]) -> None:
    """Replace tensors by identity, also in lists, which recurrent layers have."""
    renew = lambda value: new.get(id(value), value)
    for module in model.modules():
        for name, value in vars(module).items():
            if name in STORES:
                for key, tensor in value.items():
                    value[key] = renew(tensor)
            elif isinstance(value, (list, tuple)) and _any_of(value, new):
                vars(module)[name] = pytree.tree_map(renew, value)


def _any_of(value: Any, new: Mapping[int, Tensor]) -> bool:
    return any(id(leaf) in new for leaf in pytree.tree_leaves(value))
