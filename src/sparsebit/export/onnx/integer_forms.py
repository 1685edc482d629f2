"""Ops in another form that onnxruntime computes faster in integers. The numbers stay the same.

- AveragePool is a depthwise Conv whose weights are all 1 / (size of the window). It takes 0.9 of the time of the float
  op, where QLinearAveragePool takes 11 times that.
- MaxPool over more than 9 places reads float values behind a depthwise Conv of 1 x 1 with the weight 1, which changes
  no value. So it stands in the blocked layout of float convolutions, where it is many times faster.
- HardSigmoid, clip(a x + b, 0, 1), is a change of scale. The codes of x are read with the scale a s. They are written
  with a zero point that is b in steps of the output. onnxruntime makes a table of 256 bytes of it (LeakyRelu, slope 1).
- Conv of 1 x 1 whose output is read in float is a Gemm over all places of the images. onnxruntime's integer Gemm gives
  float values, its integer Conv does not. Between float ops that takes 0.9 of the time of Conv, Quantize, Dequantize.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from sparsebit.export.onnx.graph_edit import (
    array_of,
    attribute_of,
    constant,
    insert,
    made_by,
    readers,
    replace,
)
from sparsebit.export.onnx.lowered import Lowered

LARGEST_POOL = 9  # places: smaller pools stay integer
BLOCK = 16  # channels of the blocked layout, with AVX-512; 8 with AVX2
TO_LAST = [0, 2, 3, 1]  # moves the channels of images
TO_FIRST = [0, 3, 1, 2]


def pools_as_convs(model: ir.Model) -> int:
    """AveragePool between integers, with one divisor for every window, becomes a Conv."""
    changed = 0
    for node in list(model.graph):
        if node.op_type == "AveragePool" and _is_between_codes(node) and _has_one_divisor(node):
            x = node.inputs[0]
            channels = None
            if x is not None and x.shape is not None and len(x.shape) > 2:
                channels = x.shape[1]
            if isinstance(channels, int):
                _pool_as_conv(node, channels)
                changed += 1
    return changed


def _has_one_divisor(node: ir.Node) -> bool:
    def ints(key: str, default: list[int]) -> list[int]:
        return list(attribute_of(node, key, default))

    def number(key: str) -> int:
        return int(attribute_of(node, key, 0))

    auto = attribute_of(node, "auto_pad", "NOTSET")
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
    _take_place(node, insert(node, "Conv", [node.inputs[0], weight], name, options))


def _take_place(node: ir.Node, out: ir.Value) -> None:
    """`out` replaces the output of `node`, under the name by which the certificate knows it."""
    old = node.outputs[0]
    out.type = old.type
    out.shape = old.shape
    if old.is_graph_output():
        replace(node, out)  # keeps the name for the output
        return
    name = old.name
    old.name = None
    replace(node, out)
    out.name = name


def pointwise_as_products(model: ir.Model, lowered: Lowered) -> int:
    """Conv of 1 x 1 on codes, read in float, becomes Transpose, Reshape, Gemm, Reshape, Transpose."""
    changed = 0
    for node in list(model.graph):
        if node.op_type == "Conv" and _is_pointwise(node) and not _only_codes_are_read(node.outputs[0]):
            changed += _as_product(node, lowered)
    return changed


def _is_pointwise(node: ir.Node) -> bool:
    """A kernel of one place on images, without padding, strides or groups."""

    def only(key: str, value: int) -> bool:
        return key not in node.attributes or set(node.attributes[key].as_ints()) == {value}

    groups = attribute_of(node, "group", 1)
    auto = attribute_of(node, "auto_pad", "NOTSET")
    weight = node.inputs[1]
    if weight is None or weight.shape is None:
        shape = None
    else:
        shape = weight.shape.numpy()
    plain = only("pads", 0) and only("strides", 1) and groups == 1 and auto in ("NOTSET", "VALID")
    return plain and shape is not None and shape[2:] == (1, 1)


def _only_codes_are_read(value: ir.Value) -> bool:
    users = readers(value)
    return not value.is_graph_output() and bool(users) and all(u.op_type == "QuantizeLinear" for u in users)


def _as_product(node: ir.Node, lowered: Lowered) -> int:
    x, weight, *bias = node.inputs
    read, stored = (value.producer() if value is not None else None for value in (x, weight))
    is_between = read is not None and read.op_type == "DequantizeLinear" and "axis" not in read.attributes
    if not is_between or stored is None or stored.op_type != "DequantizeLinear" or x is None:
        return 0
    codes, scale, zero = (array_of(value) for value in stored.inputs[:3])
    if codes is None or codes.dtype not in (np.int8, np.uint8) or len(readers(stored.outputs[0])) > 1:
        return 0
    if bias and bias[0] is not None and bias[0].producer() is None:
        return 0  # a float bias: the integer Gemm adds int32
    graph = node.graph
    name = f"{node.name}/as_product"
    assert isinstance(graph, ir.Graph) and scale is not None and zero is not None
    matrix = constant(graph, f"{stored.inputs[0].name}/matrix", codes.reshape(len(codes), -1).T)  # type: ignore[union-attr]
    stored.replace_input_with(0, matrix)
    stored.outputs[0].shape = matrix.shape
    if scale.size > 1:
        stored.attributes["axis"] = ir.AttrInt64("axis", 1)
    for site in lowered.sites:
        if site.after == stored.outputs[0].name:
            site.transposed = True
    last = insert(node, "Transpose", [x], f"{name}/last", {"perm": TO_LAST})
    if x.shape is None:
        last.shape = None
    else:
        last.shape = ir.Shape([x.shape[i] for i in TO_LAST])
    places = constant(graph, f"{name}/places", np.asarray([-1, codes.shape[1]], np.int64))
    rows = insert(node, "Reshape", [last, places], f"{name}/rows")
    rows.shape = None
    product = insert(node, "Gemm", [rows, weight, *bias], f"{name}/gemm")
    shape = _shape_of_images(node, last, codes.shape[0], name)
    images = insert(node, "Reshape", [product, shape], f"{name}/images")
    images.shape = None
    _take_place(node, insert(node, "Transpose", [images], f"{name}/first", {"perm": TO_FIRST}))
    return 1


def _shape_of_images(node: ir.Node, last: ir.Value, channels: int, name: str) -> ir.Value:
    """(batch, height, width, channels): a constant where at most the batch is free."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    sizes: list[Any] = [None]
    if last.shape is not None:
        sizes = [last.shape[1], last.shape[2]]
    if all(isinstance(size, int) for size in sizes):
        return constant(graph, f"{name}/shape", np.asarray([-1, *sizes, channels], np.int64))
    shape = insert(node, "Shape", [last], f"{name}/sizes", {"start": 0, "end": 3})
    shape.type = ir.TensorType(ir.DataType.INT64)
    shape.shape = ir.Shape([3])
    count = constant(graph, f"{name}/channels", np.asarray([channels], np.int64))
    whole = insert(node, "Concat", [shape, count], f"{name}/shape", {"axis": 0})
    whole.shape = ir.Shape([4])
    return whole


def large_pools_in_blocks(model: ir.Model) -> int:
    """A large MaxPool on codes reads a Conv that copies its input."""
    changed = 0
    for node in list(model.graph):
        if node.op_type != "MaxPool" or "kernel_shape" not in node.attributes:
            continue
        x = node.inputs[0]
        made = made_by(node.inputs[0])
        window = node.attributes["kernel_shape"].as_ints()
        channels = None
        if x is not None and x.shape is not None and len(x.shape) == 4:
            channels = x.shape[1]
        reads_codes = made is not None and made.op_type == "DequantizeLinear"
        if (
            reads_codes
            and isinstance(channels, int)
            and not channels % BLOCK
            and np.prod(window) > LARGEST_POOL
        ):
            assert isinstance(node.graph, ir.Graph)
            ones = constant(node.graph, f"{node.name}/ones", np.ones((channels, 1, 1, 1), np.float32))
            options = {"kernel_shape": [1, 1], "group": channels}
            node.replace_input_with(0, insert(node, "Conv", [x, ones], f"{node.name}/blocked", options))
            changed += 1
    return changed


def hard_sigmoids_as_scales(model: ir.Model, lowered: Lowered) -> int:
    """HardSigmoid between integers becomes Dequantize, LeakyRelu with slope 1, Quantize with other scales."""
    changed = 0
    for node in list(model.graph):
        if node.op_type == "HardSigmoid" and _is_between_codes(node):
            changed += _as_scale(node, lowered)
    return changed


def _as_scale(node: ir.Node, lowered: Lowered) -> int:
    graph = node.graph
    read = made_by(node.inputs[0])
    written = readers(node.outputs[0])[0]
    assert isinstance(graph, ir.Graph) and read is not None
    scale = array_of(read.inputs[1])
    step = array_of(written.inputs[1])
    zero = array_of(written.inputs[2])
    if scale is None or step is None or zero is None or scale.size > 1 or step.size > 1 or zero.any():
        return 0
    slope = attribute_of(node, "alpha", 0.2)
    shift = attribute_of(node, "beta", 0.5)
    steps = shift / float(step)
    top = np.iinfo(zero.dtype).max
    if zero.dtype != np.uint8 or steps != round(steps) or not 0 <= steps <= top or top * float(step) > 1:
        return 0
    name = f"{node.name}/as_scale"
    smaller = constant(graph, f"{name}/scale", np.asarray(scale * np.float32(slope), np.float32).reshape(()))
    x = insert(node, "DequantizeLinear", [read.inputs[0], smaller, read.inputs[2]], f"{name}/DQ")
    x.type = ir.TensorType(ir.DataType.FLOAT)
    same = insert(node, "LeakyRelu", [x], f"{name}/same", {"alpha": 1.0})
    same.type = x.type
    same.shape = node.outputs[0].shape
    written.replace_input_with(2, constant(graph, f"{name}/zero_point", np.uint8(round(steps))))
    before = node.outputs[0].name
    replace(node, same)
    is_read = bool(readers(read.outputs[0])) or read.outputs[0].is_graph_output()
    for site in lowered.sites:
        if site.before == before:
            site.before = same.name or ""
            site.shift = shift
            site.clip = (0.0, 1.0)
        if site.after == read.outputs[0].name and not is_read:
            site.after = x.name or ""
            site.factor = slope
    return 1


def _is_between_codes(node: ir.Node) -> bool:
    """Does it read codes of 8 bits on one scale, and does one quantizer read its output?"""
    made = made_by(node.inputs[0])
    users = readers(node.outputs[0])
    if made is None or made.op_type != "DequantizeLinear" or made.inputs[0] is None:
        return False
    is_plain = made.inputs[0].dtype == ir.DataType.UINT8 and "axis" not in made.attributes
    alone = len(users) == 1 and users[0].op_type == "QuantizeLinear" and "axis" not in users[0].attributes
    return is_plain and alone and not node.outputs[0].is_graph_output()
