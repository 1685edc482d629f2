"""How long a forward takes in onnxruntime, in float and quantized: a prediction from measured costs of ops.

export/backends/onnxruntime_costs.json has, for CPUs with VNNI and for those with AVX2 only, what each kind of op costs:
microseconds for each call, each million products and each million values (benchmarks/op_costs.py measures them). The
sum over the ops of a graph, and over the borders between integers and float, is the time on one core. The ratio is
closer to the truth than the times: cores differ in speed more than in the proportions of their instructions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from torch import fx, nn

from sparsebit.graph.ops import called_module, module_of
from sparsebit.quantization.analysis.costs import Measured
from sparsebit.quantization.analysis.preflight_rows import Row
from sparsebit.quantization.modules.conv import is_depthwise, is_pointwise
from sparsebit.quantization.modules.unary import QIdentity

MILLION = 1e6
SLOWER = 1.05
FEW_CHANNELS = 4
GROUPS = (4, 8, 16, 32, 64)  # widths that were measured
FUSED = frozenset(  # with the convolution in front, where both are float
    ["ReLU", "ReLU6", "HardTanh", "HardSwish", "HardSigmoid", "Sigmoid", "LeakyReLU"]
)
FREE = frozenset(["ReLU", "ReLU6", "HardTanh", "Identity", "Dropout"])  # part of the op in front
KINDS = {  # ops of the pre-flight report -> rows of the table
    "Linear": "Gemm",
    "Attention": "MatMul",
    "MultiheadAttention": "MatMul",
    "MatMul": "MatMul",
    "Add": "Add",
    "Mul": "Mul",
    "Concat": "Concat",
    "Sigmoid": "Sigmoid",
    "LeakyReLU": "LeakyRelu",
    "AdaptiveAvgPool2d": "GlobalAveragePool",
    "Mean": "GlobalAveragePool",
    "HardSwish": "HardSwish",
    "HardSigmoid": "HardSigmoid",
    "SiLU": "Sigmoid",
    "MaxPool2d": "MaxPool",
    "GELU": "Gelu",
    "Tanh": "Tanh",
    "Softmax": "Softmax",
    "LayerNorm": "LayerNorm",
}
AS_TABLES = {"HardSigmoid": "LeakyRelu"}  # in integers (export/onnx/integer_forms.py)


@dataclass(frozen=True)
class Prediction:
    """Milliseconds on one core of a CPU as the table's, and the ops that lose most by integers."""

    cpu: str
    float_ms: float
    quantized_ms: float
    slower: tuple[tuple[str, float, float], ...]  # name, float and quantized milliseconds

    @property
    def ratio(self) -> float:
        return self.quantized_ms / self.float_ms if self.float_ms else 1.0


def speed_line(found: Mapping[str, Prediction]) -> str:
    """`predicted, on one core: 0.42 of float with VNNI, 0.69 with AVX2 only`, and what to do if it is slower."""
    names = {"vnni": "VNNI", "avx2": "AVX2 only"}
    shown = ", ".join(f"{found[cpu].ratio:.2f} of float with {name}" for cpu, name in names.items())
    text = f"predicted, on one core: {shown}"
    worst = max(found.values(), key=lambda prediction: prediction.ratio)
    if worst.ratio > SLOWER:
        names_of = ", ".join(name for name, _, _ in worst.slower[:3])
        text += f"; slower in integers: {names_of}. With tune=True (--tune), slow layers stay float"
    return text


@cache
def costs() -> dict[str, Any]:
    """The measured costs, by "vnni" and "avx2"."""
    file = resources.files("sparsebit.export.backends") / "onnxruntime_costs.json"
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def predict(gm: fx.GraphModule, rows: list[Row], measured: Measured, cpu: str) -> Prediction:
    """The time of the graph whose pre-flight rows these are; `cpu` is "vnni" or "avx2"."""
    table = costs()[cpu]
    nodes = {node.name: node for node in gm.graph.nodes}
    integer_rows = {row.name for row in rows if row.integer}
    totals = {"float": 0.0, "integer": 0.0}
    each: list[tuple[str, float, float]] = []
    for row in rows:
        node = nodes.get(row.name)
        module = None
        if node is not None and node.op == "call_module":
            module = module_of(node, gm)
        kind = _kind(row.op, module)
        if kind not in table["ops"]:
            # recurrent layers and the like: the same in both files
            products = {"products": row.macs / MILLION}
            same = _time(table["ops"]["Gemm"]["float"], products) if row.macs else 0.0
            totals["float"] += same
            totals["integer"] += same
            continue
        features = _features(row, module, measured.values.get(row.name, 0), kind)
        plain = _time(table["ops"][kind]["float"], features)
        in_float = plain
        if node is not None and _is_fused(row.op, node, gm):
            in_float = 0.0
        quantized = in_float
        if row.integer:
            quantized = _time(table["ops"][AS_TABLES.get(kind, kind)].get("integer", {}), features) or plain
            if kind == "MaxPool":
                quantized = plain  # behind integer convolutions the channels are last
        if node is not None:
            quantized += _borders(node, gm, row.integer, integer_rows, measured, table["borders"])
        totals["float"] += in_float
        totals["integer"] += quantized
        each.append((row.name, in_float / 1000, quantized / 1000))
    slower = [item for item in each if item[2] > item[1]]
    slower.sort(key=lambda item: item[1] - item[2])
    return Prediction(cpu, totals["float"] / 1000, totals["integer"] / 1000, tuple(slower[:5]))


def _kind(op: str, module: nn.Module | None) -> str:
    """The row of the table."""
    if not op.startswith("Conv") or op == "Concat" or module is None:
        return KINDS.get(op, "")
    conv: Any = module
    if not hasattr(conv, "groups"):
        return ""
    if is_depthwise(conv):
        if conv.out_channels == conv.in_channels:
            return "Conv depthwise"
        return "Conv of several filters"
    if conv.groups > 1:
        width = conv.in_channels // conv.groups
        return f"Conv in groups of {min(GROUPS, key=lambda known: abs(known - width))}"
    if conv.in_channels <= FEW_CHANNELS:
        return "Conv of few channels"
    if is_pointwise(conv) or max(conv.kernel_size) == 1:
        return "Conv 1x1"
    return "Conv"


def _features(row: Row, module: Any, values: int, kind: str) -> dict[str, float]:
    found = {"products": row.macs / MILLION, "values": values / MILLION}
    if kind.startswith("Conv"):
        found["gathered"] = row.macs * module.groups / module.out_channels / MILLION
    elif kind == "Gemm":
        found["gathered"] = row.macs / max(getattr(module, "out_features", 1), 1) / MILLION
    return found


def _time(numbers: Mapping[str, float], features: Mapping[str, float]) -> float:
    total = numbers.get("call", 0.0)
    for name, value in features.items():
        total += numbers.get(name, 0.0) * value
    return total


def _is_fused(op: str, node: fx.Node, gm: fx.GraphModule) -> bool:
    """Does the float op cost nothing: in the convolution in front, or in the one kernel of x * gate(x)?"""
    sources = [_behind_identity(source, gm) for source in node.all_input_nodes]
    if op == "Mul" and len(sources) == 2:
        x, gate = sources
        return x in gate.all_input_nodes or gate in x.all_input_nodes
    if op not in FUSED or not sources or not _is_conv(sources[0], gm):
        return False
    return op != "Sigmoid" or len(sources[0].users) == 1  # x * sigmoid(x) is a kernel behind the convolution


def _behind_identity(node: fx.Node, gm: fx.GraphModule) -> fx.Node:
    """The value that an identity with a quantizer hands on."""
    module = called_module(node, gm)
    if isinstance(module, QIdentity) and node.all_input_nodes:
        return node.all_input_nodes[0]
    return node


def _is_conv(node: fx.Node, gm: fx.GraphModule) -> bool:
    module = called_module(node, gm)
    return hasattr(module, "kernel_size") and hasattr(module, "groups")


def _borders(
    node: fx.Node,
    gm: fx.GraphModule,
    integer: bool,
    integer_rows: set[str],
    measured: Measured,
    table: Mapping[str, Mapping[str, float]],
) -> float:
    """Rounding of what an integer op reads from float ops, and the way back in front of float ops."""
    total = 0.0
    for source in node.all_input_nodes:
        made = _maker(source, gm)
        values = measured.values.get(source.name, 0) / MILLION
        if integer and made.name not in integer_rows:
            total += _time(table.get("QuantizeLinear", {}), {"values": values})
        elif not integer and made.name in integer_rows:
            total += _time(table.get("DequantizeLinear", {}), {"values": values})
    return total


def _maker(node: fx.Node, gm: fx.GraphModule) -> fx.Node:
    """The op whose values arrive: behind clips and identities, which belong to the op in front."""
    while len(node.all_input_nodes) == 1 and node.all_input_nodes[0].op != "placeholder":
        if type(called_module(node, gm)).__name__.removeprefix("Q") not in FREE:
            break
        node = node.all_input_nodes[0]
    return node
