"""Ops in another form that onnxruntime computes faster in integers. The numbers stay the same.

- AveragePool is a depthwise Conv whose weights are all 1 / (size of the window). It takes 0.9 of the time of the float
  op, where QLinearAveragePool takes 11 times that.
- HardSigmoid, clip(a x + b, 0, 1), is a change of scale. The codes of x are read with the scale a s. They are written
  with a zero point that is b in steps of the output. onnxruntime makes a table of 256 bytes of it (LeakyRelu, slope 1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from sparsebit.export.graph_edit import array_of, constant, insert, made_by, readers, replace
from sparsebit.export.lowered import Lowered


def pools_as_convs(model: ir.Model) -> int:
    """AveragePool between integers, with one divisor for every window, becomes a Conv."""
    changed = 0
    for node in list(model.graph):
        if node.op_type == "AveragePool" and _is_between_codes(node) and _has_one_divisor(node):
            x = node.inputs[0]
            channels = x.shape[1] if x is not None and x.shape is not None and len(x.shape) > 2 else None
            if isinstance(channels, int):
                _pool_as_conv(node, channels)
                changed += 1
    return changed


def _has_one_divisor(node: ir.Node) -> bool:
    def ints(key: str, default: list[int]) -> list[int]:
        return list(node.attributes[key].as_ints()) if key in node.attributes else default

    def number(key: str) -> int:
        return node.attributes[key].as_int() if key in node.attributes else 0

    auto = node.attributes["auto_pad"].as_string() if "auto_pad" in node.attributes else "NOTSET"
    is_padded = any(ints("pads", [0]))
    return (
        auto == "NOTSET" and not number("ceil_mode") and (not is_padded or bool(number("count_include_pad")))
    )


def _pool_as_conv(node: ir.Node, channels: int) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    window = list(node.attributes["kernel_shape"].as_ints())
    name = f"{node.name}/as_conv"
    stored = [
        constant(graph, f"{name}/codes", np.ones((channels, 1, *window), np.int8)),
        constant(graph, f"{name}/scale", np.float32(1 / np.prod(window))),
        constant(graph, f"{name}/zero_point", np.int8(0)),
    ]
    weight = insert(node, "DequantizeLinear", stored, f"{name}/DQ")
    weight.type = ir.TensorType(ir.DataType.FLOAT)
    options: dict[str, Any] = {"kernel_shape": window, "group": channels}
    for key in ("pads", "strides", "dilations"):
        if key in node.attributes:
            options[key] = list(node.attributes[key].as_ints())
    out = insert(node, "Conv", [node.inputs[0], weight], name, options)
    old = node.outputs[0]
    out.type, out.shape = old.type, old.shape
    name_of_value, old.name = old.name, None
    replace(node, out)
    out.name = name_of_value  # the certificate knows the value by it


def hard_sigmoids_as_scales(model: ir.Model, lowered: Lowered) -> int:
    """HardSigmoid between integers becomes Dequantize, LeakyRelu with slope 1, Quantize with other scales."""
    changed = 0
    for node in list(model.graph):
        if node.op_type == "HardSigmoid" and _is_between_codes(node):
            changed += _as_scale(node, lowered)
    return changed


def _as_scale(node: ir.Node, lowered: Lowered) -> int:
    graph, read, written = node.graph, made_by(node.inputs[0]), readers(node.outputs[0])[0]
    assert isinstance(graph, ir.Graph) and read is not None
    scale, step, zero = array_of(read.inputs[1]), array_of(written.inputs[1]), array_of(written.inputs[2])
    if scale is None or step is None or zero is None or scale.size > 1 or step.size > 1 or zero.any():
        return 0
    slope = node.attributes["alpha"].as_float() if "alpha" in node.attributes else 0.2
    shift = node.attributes["beta"].as_float() if "beta" in node.attributes else 0.5
    steps = shift / float(step)
    top = np.iinfo(zero.dtype).max
    if zero.dtype != np.uint8 or steps != round(steps) or not 0 <= steps <= top or top * float(step) > 1:
        return 0
    name = f"{node.name}/as_scale"
    smaller = constant(graph, f"{name}/scale", np.asarray(scale * np.float32(slope), np.float32).reshape(()))
    x = insert(node, "DequantizeLinear", [read.inputs[0], smaller, read.inputs[2]], f"{name}/DQ")
    x.type = ir.TensorType(ir.DataType.FLOAT)
    same = insert(node, "LeakyRelu", [x], f"{name}/same", {"alpha": 1.0})
    same.type, same.shape = x.type, node.outputs[0].shape
    written.replace_input_with(2, constant(graph, f"{name}/zero_point", np.uint8(round(steps))))
    before = node.outputs[0].name
    replace(node, same)
    is_read = bool(readers(read.outputs[0])) or read.outputs[0].is_graph_output()
    for site in lowered.sites:
        if site.before == before:
            site.before, site.shift, site.clip = same.name or "", shift, (0.0, 1.0)
        if site.after == read.outputs[0].name and not is_read:
            site.after, site.factor = x.name or "", slope
    return 1


def _is_between_codes(node: ir.Node) -> bool:
    """Does it read codes of 8 bits on one scale, and does one quantizer read its output?"""
    made, users = made_by(node.inputs[0]), readers(node.outputs[0])
    if made is None or made.op_type != "DequantizeLinear" or made.inputs[0] is None:
        return False
    is_plain = made.inputs[0].dtype == ir.DataType.UINT8 and "axis" not in made.attributes
    alone = len(users) == 1 and users[0].op_type == "QuantizeLinear" and "axis" not in users[0].attributes
    return is_plain and alone and not node.outputs[0].is_graph_output()
