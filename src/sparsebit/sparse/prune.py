"""`sparsebit.prune(model, example, ratio=0.5)`: a smaller model, in one call."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import ConfigError
from sparsebit.graph.trace import LeafTracer, trace
from sparsebit.sparse import allocate
from sparsebit.sparse.channels import Walk
from sparsebit.sparse.surgery import Cut, check_equal

log = logging.getLogger("sparsebit")


def walk_of(model: nn.Module, example: Any) -> Walk:
    """The labelled graph of `model`; `example` is a tensor, a tuple of arguments or a dict of keyword arguments."""
    args = example if isinstance(example, tuple) else () if isinstance(example, dict) else (example,)
    kwargs = example if isinstance(example, dict) else {}
    gm = trace(model, LeafTracer(), (args, kwargs))
    return Walk.through(gm.eval(), (args, kwargs))


def scores(walk: Walk) -> Tensor:
    """Per class: how large the weights are that make it, relative to their layer (L1)."""
    n = len(walk.labels)
    total, layers = torch.zeros(n), torch.zeros(n)
    for cut in walk.slices.values():
        if not cut.produces:
            continue
        owner, _, name = cut.path.rpartition(".")
        weight = getattr(walk.gm.get_submodule(owner), name).detach().float().cpu()
        size = weight.movedim(cut.axis, 0).flatten(1).norm(p=1, dim=1)
        roots = walk.labels.roots(cut.labels)
        total.index_add_(0, roots, size / size.mean().clamp_min(1e-12))
        layers.index_add_(0, roots, torch.ones_like(size))
    return total / layers.clamp_min(1)


def prune(
    model: nn.Module,
    example: Any,
    ratio: float | None = None,
    *,
    macs: float | None = None,
    params: float | None = None,
    round_to: int = 1,
) -> nn.Module:
    """A smaller copy of `model`; see sparsebit.prune."""
    if sum(given is not None for given in (ratio, macs, params)) > 1:
        raise ConfigError("prune: say how much with one of ratio, macs and params")
    walk = walk_of(model, example)
    worth = scores(walk)
    choose = lambda share: allocate.uniform(walk, worth, share, round_to)
    if macs is not None:
        dropped = allocate.within(walk, choose, allocate.macs(walk), macs)
    elif params is not None:
        dropped = allocate.within(walk, choose, allocate.parameters, params)
    else:
        dropped = choose(0.5 if ratio is None else ratio)
    cut = Cut(walk, dropped)
    compact = cut.compact()
    check_equal(cut, cut.masked(), compact)
    small = _as_written(model, cut, compact)
    return small.train(model.training)


def _as_written(model: nn.Module, cut: Cut, compact: fx.GraphModule) -> nn.Module:
    """The user's own class with smaller layers, where its code has no sizes of its own; else the graph."""
    own = copy.deepcopy(model).eval()
    args, kwargs = cut.walk.example
    try:
        cut.cut_parameters(own)
        with torch.no_grad():
            got, want = (pytree.tree_leaves(m(*args, **kwargs)) for m in (own, compact.eval()))
    except Exception as error:  # a size in its code, or a path that only the graph has
        log.info("the pruned %s is a traced graph: its own code says %s", type(model).__name__, error)
        return compact
    tensors = [(a, b) for a, b in zip(got, want) if isinstance(a, Tensor)]
    same = all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in tensors)
    return own if same and len(got) == len(want) else compact
