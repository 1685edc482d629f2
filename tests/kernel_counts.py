"""Counts of integer and float ops by kind: as pre-flight announces them, and as the optimised graph has them."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from typing import Any

from sparsebit.quantization.analysis.preflight_rows import HALF_FLOAT
from sparsebit.quantization.converters.constants import WHY_FLOAT

PRODUCTS = {"MultiheadAttention": 2, "Attention": 2}  # queries by keys, probabilities by values
WHOLE = {"AttentionFunction": 6}  # with its four projections
ROWS = {  # ops of the pre-flight report
    "Conv": ("Conv[123]d", "ConvFunction"),
    "MatMul": ("Linear", "MatMul", "Conv1D", "AddMM", "AddBMM", "AddMV", *PRODUCTS, *WHOLE),
    "Add": ("Add",),
}
KERNELS = {  # ops of the optimised graph
    "Conv": ("QLinearConv", "ConvInteger", "Conv", "FusedConv"),
    "MatMul": ("QGemm", "QLinearMatMul", "MatMulInteger*", "Gemm", "FusedGemm", "MatMul", "FusedMatMul"),
    "Add": ("QLinearAdd",),  # a float Add is fused with others, or is a bias
}


def announced(found: Any) -> Counter[str]:
    """`integer Conv`, `float Conv`, ... of a pre-flight report."""
    counts: Counter[str] = Counter()
    for row in found.rows:
        kind = _kind(row.op, ROWS)
        if kind and row.how != WHY_FLOAT and (row.integer or kind != "Add"):
            products = {**PRODUCTS, **WHOLE}.get(row.op, 1)
            if row.backend == HALF_FLOAT:
                products -= 1
                counts[f"integer {kind}"] += 1
            counts[f"{'integer' if row.integer else 'float'} {kind}"] += products
    return counts


def computed(report: Any) -> Counter[str]:
    """The same of the file, from an export report."""
    counts: Counter[str] = Counter()
    for how, ops in (("integer", report.integer), ("float", report.floating)):
        for op, n in ops.items():
            kind = _kind(op, KERNELS)
            if kind:
                counts[f"{how} {kind}"] += n
    counts["integer Conv"] -= _nodes_named(report.path, "/as_conv")  # average pools
    products = _nodes_named(report.path, "/as_product/gemm")  # convolutions of 1 x 1
    counts["integer Conv"] += products
    counts["integer MatMul"] -= products
    copies = _nodes_named(report.path, "/blocked")  # in front of large pools
    counts["float Conv"] -= copies
    return +counts


def _nodes_named(path: str, ending: str) -> int:
    """Nodes that the exporter has written in the place of others."""
    import onnx

    nodes = onnx.load(path, load_external_data=False).graph.node
    return sum(node.name.endswith(ending) for node in nodes)


def _kind(op: str, kinds: dict[str, tuple[str, ...]]) -> str:
    return next((kind for kind, names in kinds.items() if any(fnmatchcase(op, n) for n in names)), "")
