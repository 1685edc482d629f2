"""Packed weights, for runtimes that multiply codes directly: stored as (inputs, outputs), in front of a MatMul.

onnxruntime makes a MatMulNBits, TensorRT an int4 product, of DequantizeLinear -> MatMul. torch's
exporter writes a Linear as Gemm(transB=1), or as Transpose -> MatMul.
"""

from __future__ import annotations

import onnx_ir as ir

from sparsebit.export.onnx.graph_edit import insert, is_mark, marks_in, name_of, readers, replace
from sparsebit.export.onnx.marks import Mark, Marks
from sparsebit.export.onnx.types import container_bits

TRANSPOSED = "transposed"  # on a mark: the weight is stored the other way round


def packed_products(model: ir.Model, marks: Marks) -> int:
    """Bring every product of a float value and a packed weight into that form."""
    changed = 0
    for node in marks_in(model):
        mark = marks.get(name_of(node))
        if mark is None or not _packs(mark):
            continue
        users = readers(node.outputs[0])
        if users and all(_is_product(user) for user in users):
            node.metadata_props[TRANSPOSED] = "1"
            weight = node.outputs[0]
            if weight.shape is None:
                weight.shape = None
            else:
                weight.shape = ir.Shape(list(weight.shape)[::-1])
            for user in users:
                replace(user, weight if user.op_type == "Transpose" else _as_matmul(user))
            changed += 1
    return changed


def _packs(mark: Mark) -> bool:
    """A matrix in groups, or of so few bits that there is no integer kernel for it but this one."""
    matrix = mark.weight is not None and mark.weight.dim() == 2 and mark.spec.axis == 0
    return matrix and (mark.spec.group is not None or container_bits(mark) < 8)


def _is_product(user: ir.Node) -> bool:
    if user.op_type == "Gemm":
        wanted = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 1}
        given = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
        given |= {name: attribute.value for name, attribute in user.attributes.items() if name in wanted}
        return given == wanted and _is_float(user)
    swapped = user.op_type == "Transpose" and list(user.attributes["perm"].as_ints()) == [1, 0]
    return swapped and all(u.op_type == "MatMul" and _is_float(u) for u in readers(user.outputs[0]))


def _is_float(product: ir.Node) -> bool:
    """Is its other input not quantized? With integers on both sides the runtime has other kernels."""
    x = product.inputs[0]
    return x is not None and not is_mark(x.producer())


def _as_matmul(gemm: ir.Node) -> ir.Value:
    x, weight, *bias = gemm.inputs
    out = insert(gemm, "MatMul", [x, weight], f"{gemm.name}/product")
    out.shape = gemm.outputs[0].shape
    if bias and bias[0] is not None:
        out = insert(gemm, "Add", [out, bias[0]], f"{gemm.name}/bias")
    return out
