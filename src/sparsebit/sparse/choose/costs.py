"""The costs of a model, and an estimate of its costs after a cut. A search for a budget estimates many cuts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.graph.ops import op_of
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.interpreter import Runner
from sparsebit.graph.run.macs import MacCounter
from sparsebit.sparse.cut.surgery import Cut
from sparsebit.sparse.labels.walk import Walk

log = logging.getLogger("sparsebit")
SHORT = 1e-3  # seconds
Cost = Callable[[nn.Module], float]
Estimate = Callable[[Cut], float]


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def macs(walk: Walk) -> Callable[[nn.Module], int]:
    """Count the multiplications of one forward on the example."""
    args, kwargs = walk.example

    def count(model: nn.Module) -> int:
        with torch.no_grad(), MacCounter() as counter:
            model(*args, **kwargs)
        return counter.macs

    return count


def latency(walk: Walk, rounds: int = 15) -> Callable[[nn.Module], float]:
    """Time one forward on the example, as a share of the time of the whole model.

    The best of some rounds counts. Both models run in turns, because the load of the machine changes from
    second to second.
    """

    def measure(model: nn.Module) -> float:
        best = {model.eval(): float("inf"), walk.gm.eval(): float("inf")}
        for _ in range(rounds):
            best = {each: min(known, _seconds(each, walk.example)) for each, known in best.items()}
        if model is walk.gm and best[model] < SHORT:
            log.warning(
                "latency: a forward of the example takes %.2f ms, which is mostly the overhead of calls "
                "and not of sizes; give a larger example",
                1e3 * best[walk.gm],
            )
        return best[model] / best[walk.gm]

    return measure


@torch.no_grad()
def _seconds(model: nn.Module, example: Call) -> float:
    args, kwargs = example.copy()
    start = time.perf_counter()
    model(*args, **kwargs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


EXACT: dict[str, Callable[[Walk], Cost]] = {
    "macs": macs,
    "params": lambda walk: parameters,
    "latency": latency,
}


# -- without making the model ------------------------------------------------------------------------------
def kept_parameters(walk: Walk) -> Estimate:
    names: dict[nn.Parameter, list[str]] = {}  # a module may hold a parameter that `F.linear` reads
    for name, p in walk.gm.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)

    shares_of = _shares(walk)

    def count(cut: Cut) -> float:
        shares = shares_of(cut)
        return sum(p.numel() * min(shares.get(name, 1.0) for name in found) for p, found in names.items())

    return count


def kept_macs(walk: Walk) -> Estimate:
    """Estimate the MACs. A layer keeps the share of its weights; a product of activations keeps the share of
    its operands."""
    counter = PerNode(walk.gm)
    counter.run_on(walk.example)
    nodes = {node: counter.macs[node.name] for node in walk.gm.graph.nodes if counter.macs[node.name]}

    shares_of = _shares(walk)

    def count(cut: Cut) -> float:
        shares = shares_of(cut)
        left = lambda node: _of_weights(cut, node, shares) if node.op == "call_module" else None
        return sum(n * (_left(cut, node) if (of := left(node)) is None else of) for node, n in nodes.items())

    return count


def _of_weights(cut: Cut, node: fx.Node, shares: dict[str, float]) -> float | None:
    """The share that is left of the weight of a layer, or of all matrices of a recurrent layer."""
    path = str(node.target)
    if f"{path}.weight" in shares:
        return shares[f"{path}.weight"]
    if not isinstance(cut.walk.module(node), nn.RNNBase):
        return None
    sizes = {f"{path}.{k}": p.numel() for k, p in cut.walk.module(node).named_parameters() if p.dim() > 1}
    return sum(n * shares.get(name, 1.0) for name, n in sizes.items()) / sum(sizes.values())


class PerNode(Runner):
    """Counts the multiplications of every node."""

    def __init__(self, gm: fx.GraphModule):
        super().__init__(gm)
        self.macs: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        with MacCounter() as counter:
            value = super().run_node(n)
        self.macs[n.name] = counter.macs
        return value


def _shares(walk: Walk) -> Callable[[Cut], dict[str, float]]:
    """The share of each tensor that is left, by path."""
    parts = list(walk.slices.values())
    sizes = torch.tensor([part.labels.numel() for part in parts], dtype=torch.long)
    owners = torch.arange(len(parts)).repeat_interleave(sizes)
    if parts:
        labels = torch.cat([part.labels.flatten() for part in parts])
    else:
        labels = owners

    def of(cut: Cut) -> dict[str, float]:  # all at once: a search for a budget calls this hundreds of times
        kept = torch.bincount(owners, cut.keeps(labels).double(), len(parts)) / sizes
        found: dict[str, float] = {}
        for part, share in zip(parts, kept.tolist()):
            found[part.path] = found.get(part.path, 1.0) * share
        return found

    return of


def _left(cut: Cut, node: fx.Node) -> float:
    """The share of a product that is left: the share of the result times the share of the axis that is
    summed.

    Attention has two products. Each has the width of a head on one side only.
    """
    fused = op_of(node, cut.walk.gm) is F.scaled_dot_product_attention
    first = None
    if node.all_input_nodes and not fused:
        first = cut.walk.of[node.all_input_nodes[0]]
    share = 1.0
    for labels, axes in ((cut.walk.of[node], None), (first, -1)):
        if isinstance(labels, Tensor) and labels.dim():
            lost = cut.axes(labels)
            if axes is None:
                wanted = lost
            else:
                wanted = {d: k for d, k in lost.items() if d == labels.dim() - 1}
            for kept in wanted.values():
                share *= float(kept.float().mean())
    return share


ESTIMATES: dict[str, Callable[[Walk], Estimate]] = {"macs": kept_macs, "params": kept_parameters}
