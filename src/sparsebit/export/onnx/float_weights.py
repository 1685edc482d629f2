"""Weights of layers that onnxruntime computes in float, stored as float.

Codes behind a DequantizeLinear save space, but a float kernel then unpacks them in every run and cannot prepare them: a
convolution takes two to three times as long. The values stay those of the grid. A file with weights in codes only (the
presets w8 and w4) is made for its size, and is not changed.
"""

from __future__ import annotations

import onnx_ir as ir

from sparsebit.export.kernels.why_float import BYTES, WEIGHTED, reason_of
from sparsebit.export.onnx.graph_edit import array_of, constant, made_by, readers
from sparsebit.export.onnx.marks import Marks

KIND = "sparsebit.kind"


def store_as_float(model: ir.Model, marks: Marks) -> int:
    """Replace the codes of such weights by their values; returns how many."""
    if all(mark.is_weight for mark in marks.values()):
        return 0
    changed = 0
    for node in list(model.graph):
        codes = None
        if node.op_type == "DequantizeLinear":
            codes = node.inputs[0]
        is_weight = node.metadata_props.get(KIND) == "weight" and "block_size" not in node.attributes
        if codes is None or not is_weight or codes.dtype not in BYTES:
            continue
        if not any(_takes_codes(user) for user in readers(node.outputs[0])):
            _store(node)
            changed += 1
    return changed


def _takes_codes(user: ir.Node) -> bool:
    """Is it a layer that is computed in integers, or one that has only its weight in codes?"""
    if user.op_type == "Transpose":
        return any(map(_takes_codes, readers(user.outputs[0])))
    if user.op_type not in WEIGHTED:
        return False
    x = made_by(user.inputs[0])
    reads_codes = x is not None and x.op_type == "DequantizeLinear"
    return not reads_codes or not reason_of(user)


def _store(node: ir.Node) -> None:
    codes, scale, zero = (array_of(value) for value in node.inputs[:3])
    graph = node.graph
    out = node.outputs[0]
    assert codes is not None and scale is not None and zero is not None and isinstance(graph, ir.Graph)
    if scale.ndim:
        shape = [1] * codes.ndim
        shape[node.attributes["axis"].as_int()] = -1
        scale = scale.reshape(shape)
        zero = zero.reshape(shape)
    values = (codes.astype("int32") - zero.astype("int32")).astype("float32") * scale
    name = out.name or ""
    out.name = None
    out.replace_all_uses_with(constant(graph, name, values.astype("float32")))
    graph.remove(node, safe=True)
