"""`sparsebit.prune(model, example, ratio=0.5)`: a smaller model, in one call."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.errors import ConfigError
from sparsebit.graph.trace import LeafTracer, trace
from sparsebit.sparse.channels import Walk
from sparsebit.sparse.labels import FIXED
from sparsebit.sparse.surgery import Cut, check_equal


def walk_of(model: nn.Module, example: Any) -> Walk:
    args = example if isinstance(example, tuple) else () if isinstance(example, dict) else (example,)
    kwargs = example if isinstance(example, dict) else {}
    gm = trace(model, LeafTracer(), (args, kwargs))
    return Walk.through(gm.eval(), (args, kwargs))


def scores(walk: Walk) -> Tensor:
    """Per class: how large the weights are that make it, relative to their layer."""
    n = len(walk.labels._parent)
    total, layers = torch.zeros(n), torch.zeros(n)
    for cut in walk.slices.values():
        if not cut.produces:
            continue
        owner, _, name = cut.path.rpartition(".")
        weight = getattr(walk.gm.get_submodule(owner), name).detach().float()
        size = weight.movedim(cut.axis, 0).flatten(1).norm(p=1, dim=1)
        roots = walk.labels.roots(cut.labels)
        total.index_add_(0, roots, size / size.mean().clamp_min(1e-12))
        layers.index_add_(0, roots, torch.ones_like(size))
    return total / layers.clamp_min(1)


def choose(walk: Walk, ratio: float) -> Tensor:
    """The classes of least score go, the same share of every dimension; one stays everywhere."""
    if not 0 <= ratio < 1:
        raise ConfigError(f"ratio: must be at least 0 and below 1, got {ratio}")
    found, score = [], scores(walk)
    for dimension in walk.dimensions():
        n = min(int(len(dimension) * ratio), len(dimension) - 1)
        found.append(dimension[score[dimension].argsort(stable=True)[:n]])
    dropped = torch.cat(found) if found else torch.zeros(0, dtype=torch.long)
    assert FIXED not in dropped
    return dropped


def prune(model: nn.Module, example: Any, ratio: float = 0.5) -> nn.Module:
    walk = walk_of(model, example)
    cut = Cut(walk, choose(walk, ratio))
    compact = cut.compact()
    check_equal(cut, cut.masked(), compact)
    return _as_written(model, cut, compact)


def _as_written(model: nn.Module, cut: Cut, compact: fx.GraphModule) -> nn.Module:
    """The user's own class with smaller layers, where its code has no sizes of its own; else the graph."""
    own = copy.deepcopy(model)
    args, kwargs = cut.walk.example
    try:
        cut.cut_parameters(own)
        own.eval()
        with torch.no_grad():
            same = torch.utils._pytree.tree_map_only(Tensor, lambda t: t, own(*args, **kwargs))
            want = compact(*args, **kwargs)
        leaves = torch.utils._pytree.tree_leaves
        close = all(
            torch.allclose(a, b, rtol=1e-4, atol=1e-5)
            for a, b in zip(leaves(same), leaves(want))
            if isinstance(a, Tensor)
        )
    except Exception:
        return compact
    own.train(model.training)
    return own if close else compact
