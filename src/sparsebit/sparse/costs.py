"""What a model costs, and what a cut would leave of it without making the smaller model: budgets try many cuts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from sparsebit.sparse.channels import Walk
from sparsebit.sparse.running import Runner
from sparsebit.sparse.surgery import Cut

Cost = Callable[[nn.Module], float]
Estimate = Callable[[Cut], float]


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def macs(walk: Walk) -> Callable[[nn.Module], int]:
    """Multiplications of one forward on the example."""
    args, kwargs = walk.example

    def count(model: nn.Module) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(*args, **kwargs)
        return counter.get_total_flops() // 2

    return count


def seconds(walk: Walk, rounds: int = 7) -> Callable[[nn.Module], float]:
    """Time of one forward on the example, on this machine: the best of some rounds."""
    args, kwargs = walk.example

    def measure(model: nn.Module) -> float:
        model.eval()
        best = float("inf")
        with torch.no_grad():
            for _ in range(rounds):
                start = time.perf_counter()
                model(*args, **kwargs)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                best = min(best, time.perf_counter() - start)
        return best

    return measure


EXACT: dict[str, Callable[[Walk], Cost]] = {
    "macs": macs,
    "params": lambda walk: parameters,
    "latency": seconds,
}


# -- without making the model ------------------------------------------------------------------------------
def kept_parameters(walk: Walk) -> Estimate:
    names: dict[nn.Parameter, list[str]] = {}  # a parameter that `F.linear` reads is in a module, too
    for name, p in walk.gm.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)

    shares_of = _shares(walk)

    def count(cut: Cut) -> float:
        shares = shares_of(cut)
        return sum(p.numel() * min(shares.get(name, 1.0) for name in found) for p, found in names.items())

    return count


def kept_macs(walk: Walk) -> Estimate:
    """Of a layer: its MACs times what is left of its weights. Of a product of activations: times what is left of it."""
    counter = PerNode(walk.gm)
    counter.run_on(walk.gm, walk.example)
    nodes = {node: counter.flops[node.name] / 2 for node in walk.gm.graph.nodes if counter.flops[node.name]}

    shares_of = _shares(walk)

    def count(cut: Cut) -> float:
        shares, total = shares_of(cut), 0.0
        for node, n in nodes.items():
            weight = f"{node.target}.weight"
            total += n * (
                shares[weight] if node.op == "call_module" and weight in shares else _left(cut, node)
            )
        return total

    return count


class PerNode(Runner):
    """Floating-point operations of every node."""

    def __init__(self, gm: fx.GraphModule):
        super().__init__(gm)
        self.flops: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(n)
        self.flops[n.name] = counter.get_total_flops()
        return value


def _shares(walk: Walk) -> Callable[[Cut], dict[str, float]]:
    """Path of a tensor -> the share of it that is left."""
    parts = list(walk.slices.values())
    sizes = torch.tensor([part.labels.numel() for part in parts], dtype=torch.long)
    owners = torch.arange(len(parts)).repeat_interleave(sizes)
    labels = torch.cat([part.labels.flatten() for part in parts]) if parts else owners

    def of(cut: Cut) -> dict[str, float]:  # all at once: budgets ask hundreds of times
        kept = torch.bincount(owners, cut.keeps(labels).double(), len(parts)) / sizes
        found: dict[str, float] = {}
        for part, share in zip(parts, kept.tolist()):
            found[part.path] = found.get(part.path, 1.0) * share
        return found

    return of


def _left(cut: Cut, node: fx.Node) -> float:
    """A product: the share of the result, times that of the axis which is summed up."""
    first = cut.walk.of[node.all_input_nodes[0]] if node.all_input_nodes else None
    share = 1.0
    for labels, axes in ((cut.walk.of[node], None), (first, -1)):
        if isinstance(labels, Tensor) and labels.dim():
            lost = cut.axes(labels)
            wanted = lost if axes is None else {d: k for d, k in lost.items() if d == labels.dim() - 1}
            for kept in wanted.values():
                share *= float(kept.float().mean())
    return share


ESTIMATES: dict[str, Callable[[Walk], Estimate]] = {"macs": kept_macs, "params": kept_parameters}
