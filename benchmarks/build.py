"""Build time against the number of graph nodes: it must grow linearly, and 2,000 nodes stay under 10 s.

python benchmarks/build.py
"""

from __future__ import annotations

import time

from torch import nn

from sparsebit.quantization import QuantModel


def deep(nodes: int) -> nn.Module:
    """conv - bn - relu, repeated until the graph has about `nodes` nodes."""
    block = lambda: (nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    return nn.Sequential(*[layer for _ in range(nodes // 3) for layer in block()])


def seconds(nodes: int) -> float:
    model = deep(nodes)
    start = time.process_time()
    QuantModel(model, "w8a8")
    return time.process_time() - start


def main() -> None:
    seconds(60)  # imports and caches
    base = None
    for nodes in (250, 500, 1000, 2000):
        took = seconds(nodes)
        base = base or took / nodes
        print(
            f"{nodes:5d} nodes: {took:5.2f} s CPU, {took / nodes / base:.2f} x the time per node of 250 nodes"
        )


if __name__ == "__main__":
    main()
