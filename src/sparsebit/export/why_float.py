"""Which ops of a lowered graph cannot run in integers, and why: said before the runtime shows it."""

from __future__ import annotations

import onnx_ir as ir

from sparsebit.export.graph_edit import array_of, readers

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
NEEDS_OUTPUT = (
    "Conv",
    "Add",
    "AveragePool",
    "GlobalAveragePool",
    "Concat",
    "Sigmoid",
    "LeakyRelu",
    "Softmax",
)
FUSED_BEHIND = ("Relu", "Clip")


def why_float(model: ir.Model) -> dict[str, str]:
    """By module path (or node name): the reason why the op stays float."""
    found: dict[str, str] = {}
    for node in model.graph:
        if node.domain or (node.op_type not in WEIGHTED and node.op_type not in NEEDS_OUTPUT):
            continue
        reason = _reason(node)
        if reason:
            found[f"{where(node)} ({node.op_type})"] = reason
    return found


def where(node: ir.Node) -> str:
    """The module path that torch's exporter wrote beside the node."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
    names = [s.strip(" '\"") for s in scopes.strip("[]").split(",")]
    return next((n for n in reversed(names[:-1]) if n), None) or str(node.name)


def _reason(node: ir.Node) -> str:
    if node.op_type == "ConvTranspose":
        return "onnxruntime has no integer kernel for ConvTranspose"
    inputs = node.inputs[:2] if node.op_type in WEIGHTED else node.inputs
    for value in inputs:
        if value is None or (node.op_type == "Add" and array_of(value) is not None):
            continue
        made = value.producer()
        if made is not None and made.op_type == "Sum" and len(made.inputs) == 1:  # rewrites.keep_apart
            made = made.inputs[0].producer() if made.inputs[0] is not None else None
        if made is None or made.op_type != "DequantizeLinear":
            return f"its input {value.name!r} is not quantized"
        kind = made.inputs[0].dtype if made.inputs[0] is not None else None
        if kind is not None and kind not in (ir.DataType.INT8, ir.DataType.UINT8):
            return f"{kind.name.lower()} has no integer kernel: the values are dequantized first"
    if node.op_type in NEEDS_OUTPUT:
        return _output_reason(node.outputs[0])
    return ""


def _output_reason(value: ir.Value) -> str:
    users = readers(value)
    if value.is_graph_output():
        return "its output is an output of the model"
    if len(users) == 1 and users[0].op_type in FUSED_BEHIND:
        return _output_reason(users[0].outputs[0])
    if all(u.op_type == "QuantizeLinear" for u in users):
        return "" if len(users) == 1 else "its readers quantize it in different ways"
    other = next(u for u in users if u.op_type != "QuantizeLinear")
    return f"{where(other)} ({other.op_type}) reads its output unquantized"
