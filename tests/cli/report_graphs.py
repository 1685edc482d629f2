"""Facts of models that are too large to build in a test."""

from __future__ import annotations

from sparsebit.report.facts import Facts, Graph, Histogram, Layer


def transformer(blocks: int) -> Graph:
    """Attention with three branches and two residual additions, 14 nodes a block."""
    nodes: list[tuple[str, str]] = [("x", "input")]
    edges: list[tuple[int, int]] = []

    def add(name: str, op: str, *sources: int) -> int:
        nodes.append((name, op))
        edges.extend((source, len(nodes) - 1) for source in sources)
        return len(nodes) - 1

    x = 0
    for i in range(blocks):
        norm = add(f"blocks_{i}_norm1", "LayerNorm", x)
        q, k, v = (add(f"blocks_{i}_attention_{part}", "Linear", norm) for part in "qkv")
        probs = add(f"blocks_{i}_softmax", "Softmax", add(f"blocks_{i}_matmul", "MatMul", q, k))
        out = add(f"blocks_{i}_attention_proj", "Linear", add(f"blocks_{i}_matmul_1", "MatMul", probs, v))
        x = add(f"add_{2 * i}", "Add", x, out)
        hidden = add(f"blocks_{i}_fc1", "Linear", add(f"blocks_{i}_norm2", "LayerNorm", x))
        out = add(f"blocks_{i}_fc2", "Linear", add(f"blocks_{i}_gelu", "GELU", hidden))
        x = add(f"add_{2 * i + 1}", "Add", x, out)
    add("output", "output", x)
    return Graph(nodes, edges, "graph TD\n")


def large() -> Facts:
    graph = transformer(blocks=42)
    facts = Facts("large.py:build", "quantize", "1", [("Parameters", "1 GB → 250 MB", "25 %")], graph=graph)
    bell = [round(1e4 * 0.9 ** abs(i - 31)) for i in range(64)]
    for i, (name, op) in enumerate(graph.nodes):
        linear = op == "Linear"
        shown = [Histogram(label, -3, 3, bell, (-2, 2), 0.01) for label in ("W4", "A8")] if linear else []
        facts.layers.append(
            Layer(name, name.replace("_", "."), op, "quantized" if linear else "float", "", "W4 A8" if linear else "",
                  "int4 per-channel", "-2 … 2 / -2 … 2", effect=30.0 + i if linear else None, own=20.0,
                  noise=0.3 / (1 + i) if linear else None, bytes=10**6, macs=10**8, histograms=shown)
        )  # fmt: skip
    return facts
