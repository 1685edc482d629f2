"""Depth: replace whole branches of residual additions by the linear layer that comes closest.

Kernels work in blocks of 8 or 16 channels. A layer of 16 gets no faster with 10, but a removed branch always
saves time. The branch is chosen by measurement: the least change of the output per saved multiplication.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.graph.ops import ADDS, op_of
from sparsebit.graph.rewrite import remove_dead_code
from sparsebit.graph.run.batches import Batches
from sparsebit.graph.run.calls import Call
from sparsebit.graph.trace.guards import as_decided
from sparsebit.sparse.choose.costs import PerNode
from sparsebit.sparse.depth.closeness import errors_of, values_at
from sparsebit.sparse.depth.search import Removal, one_by_one
from sparsebit.sparse.depth.stand_in import rows, stand_in
from sparsebit.sparse.mend.least_squares import Layer, solve
from sparsebit.sparse.trace.front_end import call_of, traced

log = logging.getLogger("sparsebit")


@dataclass(frozen=True)
class Branch:
    """One operand of an addition, with all nodes that have no other reader."""

    name: str  # the path of its layers: layer1.0
    macs: int  # saved on the example
    add: str  # the addition in the graph
    kept: str  # the other operand
    normed: bool  # is there a batch norm in it?
    size: float  # mean norm of its filters
    rank: int  # number of axes of the value
    channels: int  # along axis 1 behind a convolution, else along the last


def find_branches(model: nn.Module, example: Any) -> list[Branch]:
    """The branches that `shorten` can replace in `model`."""
    call = call_of(example, model)
    return _branches(traced(model, call).eval(), call)


def shorten(
    model: nn.Module,
    example: Any,
    branches: int | Sequence[str],
    batches: Any = None,
    progress: bool | None = None,
) -> nn.Module:
    """A traced module with linear layers in place of some branches; its attribute `shortened` names them.

    branches   a number, chosen on `batches`, or the names of the branches to replace.
    batches    inputs, or (inputs, target). With names and no batches the new layers are not fitted.
    """

    if isinstance(branches, str):
        branches = [branches]
    find = lambda gm, call: {branch.name: branch for branch in _branches(gm, call)}
    removal = Removal("depth", find, _best)
    small, names = one_by_one(removal, model, example, branches, batches, progress)
    small.shortened = names  # type: ignore[assignment]
    return small


def _best(
    whole: fx.GraphModule, small: fx.GraphModule, tried: list[Branch], calls: Batches | None
) -> tuple[str, fx.GraphModule]:
    """The branch whose removal costs least per saved multiplication, and `small` without it."""
    like = next(small.parameters())
    layers = [stand_in(branch.channels, branch.rank, branch.normed, like) for branch in tried]
    if calls is not None:
        _fit(whole, small, tried, layers, calls)
    trials = [_without(small, branch, layer) for branch, layer in zip(tried, layers)]
    if calls is None or len(trials) == 1:
        return tried[0].name, trials[0]
    errors = errors_of(whole, trials, calls)
    i = min(range(len(tried)), key=lambda i: errors[i] / tried[i].macs)
    log.info("depth: %s is replaced, relative error of the output %.3g", tried[i].name, errors[i])
    return tried[i].name, trials[i]


@torch.no_grad()
def _fit(
    whole: fx.GraphModule,
    small: fx.GraphModule,
    tried: list[Branch],
    layers: list[Any],
    calls: Batches,
) -> None:
    """Fit by least squares: from the value in front of the addition in `small` to the missing part of the sum
    in `whole`."""
    moments: list[Any] = [0.0] * len(tried)
    for call in calls:
        behind = values_at(whole, {branch.add for branch in tried}, call)
        before = values_at(small, {branch.kept for branch in tried}, call)
        for i, (branch, layer) in enumerate(zip(tried, layers)):
            x, y = (rows(value, layer[0]) for value in (before[branch.kept], behind[branch.add]))
            x, y = torch.cat([x, torch.ones_like(x[:, :1])], 1), y - x
            moments[i] = moments[i] + x.T @ torch.cat([x, y], 1)
    for branch, moment, layer in zip(tried, moments, layers):
        solve(moment, branch.size, Layer(*layer))


# -- the graph -----------------------------------------------------------------------------------------
def _branches(gm: fx.GraphModule, call: Call) -> list[Branch]:
    run = PerNode(gm)
    run.run_on(call)
    shapes = {node: value.shape for node, value in run.env.items() if isinstance(value, Tensor)}
    found: list[Branch] = []
    for node in gm.graph.nodes:
        if not node.op.startswith("call") or op_of(node, gm) not in ADDS or node.kwargs:
            continue
        for kept, end in (node.args[:2], node.args[1::-1]):
            if not isinstance(kept, fx.Node) or not isinstance(end, fx.Node):
                continue
            only = _needed_by(end, node, kept)
            saved = sum(run.macs[n.name] for n in only)
            layers = [str(n.target) for n in only if n.op == "call_module" and run.macs[n.name]]
            shape = shapes.get(node, ())
            if not layers or len(shape) < 2 or shapes.get(kept) != shape:
                continue
            convolution = hasattr(gm.get_submodule(layers[0]), "kernel_size")
            channels = shape[1 if convolution else -1]
            saved -= int(torch.Size(shape).numel()) * channels
            if saved > 0:
                rank = len(shape) if convolution else 0
                filters = [p.detach().flatten(1) for p in _parameters(gm, layers) if p.ndim > 1]
                size = float(torch.stack([f.norm(dim=1).mean() for f in filters]).mean())
                normed = convolution and any(_is_norm(n, gm) for n in only)
                name = common_path(layers)
                found.append(Branch(name, saved, node.name, kept.name, normed, size, rank, channels))
    return [replace(b, name=name) for b, name in zip(found, distinct([(b.name, b.add) for b in found]))]


def _needed_by(end: fx.Node, add: fx.Node, kept: fx.Node) -> list[fx.Node]:
    """The nodes that no other node than the branch and the addition needs."""
    only: dict[fx.Node, None] = {}
    gone = {add}
    waiting = [end]
    while waiting:
        node = waiting.pop()
        others = {user for user in node.users if not _is_checked(user)}
        if node is kept or node.op == "placeholder" or not gone.issuperset(others):
            continue
        only[node] = None
        gone.add(node)
        waiting.extend(node.all_input_nodes)
    return list(only)


def _is_checked(node: fx.Node) -> bool:
    """Do only checks of sizes read it?"""
    return node.target is as_decided or (bool(node.users) and all(map(_is_checked, node.users)))


def _drop_idle_checks(graph: fx.Graph) -> None:
    """Erase the checks whose inputs have no other reader."""
    for check in [node for node in graph.nodes if node.target is as_decided]:
        seen = set[fx.Node]()
        waiting = list(check.all_input_nodes)
        while waiting:
            node = waiting.pop()
            if node not in seen and _is_checked(node):
                seen.add(node)
                waiting.extend(node.all_input_nodes)
        if any(node.op == "call_module" for node in seen):
            graph.erase_node(check)


def _parameters(gm: fx.GraphModule, paths: list[str]) -> Iterator[Tensor]:
    return (parameter for path in paths for parameter in gm.get_submodule(path).parameters())


def _is_norm(node: fx.Node, gm: fx.GraphModule) -> bool:
    return node.op == "call_module" and isinstance(gm.get_submodule(str(node.target)), _BatchNorm)


def distinct(names: list[tuple[str, str]]) -> list[str]:
    """A name that occurs several times gets the name of the addition."""
    every = [name for name, _ in names]
    found: list[str] = []
    for name, add in names:
        found.append(name if every.count(name) == 1 else f"{name}:{add}")
    return found


def common_path(paths: list[str]) -> str:
    """layer1.0.conv1 and layer1.0.conv2 -> layer1.0; with nothing in common, the layer next to the addition."""
    parts = zip(*(path.split(".") for path in paths))
    shared = ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, parts))
    return shared or paths[0]


def _without(gm: fx.GraphModule, branch: Branch, layers: nn.Sequential) -> fx.GraphModule:
    """A graph over the same parameters without the branch, and with `layers`."""
    graph = copy.deepcopy(gm.graph)
    small = fx.GraphModule(gm, graph)
    nodes = {node.name: node for node in graph.nodes}
    add = nodes[branch.add]
    kept = nodes[branch.kept]
    value = kept
    for layer, kind in zip(layers, ("linear", "norm")):
        path = re.sub(r"\W", "_", f"{branch.name}_{kind}")
        small.add_submodule(path, layer)
        with graph.inserting_before(add):
            value = graph.call_module(path, (value,))
    add.args = tuple(x if x is kept else value for x in add.args)
    remove_dead_code(small)
    _drop_idle_checks(graph)
    remove_dead_code(small)
    graph.lint()
    small = fx.GraphModule(small, graph)  # drop the layers that have no call any more
    small._tracer_cls = graph._tracer_cls = gm._tracer_cls
    return small
