"""The bias of a layer with quantized input and weight: int32 on the grid of their product, as integer kernels add."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from sparsebit.export.kernels.why_float import FUSED_BEHIND, reason_of
from sparsebit.export.onnx.graph_edit import array_of, attribute_of, constant, insert, readers
from sparsebit.export.onnx.lowered import BIAS_OF, Bias, Lowered
from sparsebit.export.onnx.marks import Mark, Marks
from sparsebit.export.onnx.types import container_bits

Array = np.ndarray[Any, Any]
WITH_BIAS = ("Conv", "ConvTranspose", "Gemm")  # input, weight, bias
FLOAT = "sparsebit.float_bias"  # in the meta of a node that stands for a bias: the value it replaced


class Place(NamedTuple):
    """An input of a node."""

    node: ir.Node
    idx: int


def integer_bias(model: ir.Model, marks: Marks, lowered: Lowered) -> None:
    owner = {site.after: site.name for site in lowered.sites}
    calls: dict[str, list[tuple[Place, Array | None, Array]]] = {}
    for node in model.graph:
        place = _bias_of(node)
        bias = None
        if place is not None:
            _fold_sum(place)
            bias = array_of(place.node.inputs[place.idx])
        if place is None or bias is None:
            continue
        x, w = owner.get(node.inputs[0].name or ""), owner.get(_weight_of(node))  # type: ignore[union-attr]
        if w is not None:
            step = None if x is None else _step(node, marks[x], marks[w], bias)
            calls.setdefault(w, []).append((place, step, bias))
    for name, found in calls.items():
        _, step, bias = found[0]
        if step is None or any(s is None or not np.array_equal(s, step) for _, s, _ in found):
            continue  # called with inputs on different grids: no bias fits all of them
        codes = np.rint(bias.astype(np.float64) / step)
        if np.abs(codes).max(initial=0) < 2**31:
            lowered.bias[name] = Bias(codes, step)
            _store(model.graph, [place for place, _, _ in found], name, codes.astype(np.int32), step)


def _fold_sum(place: Place) -> None:
    """One constant for a bias and its correction: torch's exporter adds them only if they are short."""
    value = place.node.inputs[place.idx]
    made = value.producer() if value is not None else None
    parts = [array_of(x) for x in made.inputs] if made is not None and made.op_type == "Add" else []
    if len(parts) != 2 or parts[0] is None or parts[1] is None:
        return
    graph = place.node.graph
    assert isinstance(graph, ir.Graph) and made is not None
    total = constant(graph, f"{made.name}/total", parts[0] + parts[1])
    place.node.replace_input_with(place.idx, total)


def float_biases(model: ir.Model, lowered: Lowered) -> int:
    """Store the bias of a layer that is computed in float as plain numbers; returns the number of such layers.

    onnxruntime takes a convolution into its fast layout only if weight and bias are constants. A bias behind a
    DequantizeLinear made a depthwise convolution of 7 x 7 ten times slower. Where the output is quantized, the bias
    keeps its quantizer: onnxruntime would round a plain one on a grid that no other program knows.
    """
    changed = 0
    for node in list(model.graph):
        name = node.metadata_props.get(BIAS_OF)
        users = readers(node.outputs[0])
        if name is None or FLOAT not in node.meta or not users:
            continue
        if all(user.op_type == "Conv" and reason_of(user) and _is_read_in_float(user) for user in users):
            node.outputs[0].replace_all_uses_with(node.meta[FLOAT])
            model.graph.remove(node, safe=True)
            lowered.bias.pop(name)
            changed += 1
    return changed


def _is_read_in_float(node: ir.Node) -> bool:
    users = readers(node.outputs[0])
    if len(users) == 1 and users[0].op_type in FUSED_BEHIND:
        return _is_read_in_float(users[0])
    return all(user.op_type != "QuantizeLinear" for user in users)


def _bias_of(node: ir.Node) -> Place | None:
    """The place of the bias: an input of the layer itself, or of the Add behind a MatMul."""
    if node.op_type in WITH_BIAS and len(node.inputs) > 2 and node.inputs[2] is not None:
        return Place(node, 2)
    users = readers(node.outputs[0]) if node.op_type == "MatMul" else []
    if len(users) != 1 or users[0].op_type != "Add" or node.outputs[0].is_graph_output():
        return None
    return Place(users[0], 1 if users[0].inputs[0] is node.outputs[0] else 0)


def _weight_of(node: ir.Node) -> str:
    value = node.inputs[1]
    made = value.producer() if value is not None else None
    if node.op_type == "MatMul" and made is not None and made.op_type == "Transpose":
        value = made.inputs[0]
    return (value.name if value is not None else None) or ""


def _step(node: ir.Node, x: Mark, w: Mark, bias: Array) -> Array | None:
    """scale of the input * scale of the weight, per output channel; float32, as the runtime multiplies them."""
    if x.is_weight or not w.is_weight or x.qparams.scale.numel() != 1 or bias.dtype != np.float32:
        return None
    if (container_bits(x), container_bits(w)) != (8, 8) or bias.ndim != 1:
        return None  # no integer kernel: a rounded bias would only cost accuracy
    step: Array = (
        x.qparams.scale.detach().cpu().float().numpy() * w.qparams.scale.detach().cpu().float().numpy()
    )
    groups = attribute_of(node, "group", 1)
    if step.size == 1:
        return step.reshape(())
    if step.size * groups == bias.size:  # a grouped transposed convolution: the groups share their scales
        step = np.tile(step, groups)
    return step if step.size == bias.size else None


def _store(graph: ir.Graph, places: list[Place], name: str, codes: Array, step: Array) -> None:
    stem = name.removesuffix("weight_quantizer") + "bias"
    values = [constant(graph, f"{stem}/{what}", array) for what, array in (("codes", codes), ("scale", step))]
    out = insert(places[0].node, "DequantizeLinear", values, f"{stem}/DQ", {"axis": 0} if step.ndim else {})
    out.type = ir.TensorType(ir.DataType.FLOAT)
    made = out.producer()
    assert made is not None
    made.metadata_props[BIAS_OF] = name
    made.meta[FLOAT] = places[0].node.inputs[places[0].idx]
    for place in places:
        place.node.replace_input_with(place.idx, out)
