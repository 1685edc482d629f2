"""The ops of a lowered graph that cannot run in integers, and the reasons: known before the runtime shows it."""

from __future__ import annotations

import onnx_ir as ir

from sparsebit.export.kernels.integer_kernels import NEEDS_OUTPUT, WRONG
from sparsebit.export.kernels.wrong_kernels import is_wrong
from sparsebit.export.onnx.graph_edit import array_of, made_by, module_of, readers
from sparsebit.export.onnx.lowered import BIAS_OF

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
EXPLAINED = [op for op in NEEDS_OUTPUT if op not in ("Mul", "MaxPool", "HardSigmoid")]  # float in many graphs
NO_KERNEL = ("ConvTranspose", "LSTM", "GRU", "RNN")
SMOOTH = {"Erf": "GELU"} | {op: op for op in ("HardSwish", "HardSigmoid", "Tanh", "Elu", "PRelu", "Softplus")}
FUSED_BEHIND = ("Relu", "Clip")
BYTES = (ir.DataType.INT8, ir.DataType.UINT8)


def why_float(model: ir.Model) -> dict[str, str]:
    """The reason why each op stays float, by module path (or node name)."""
    found: dict[str, str] = {}
    for node in model.graph:
        if node.domain or node.op_type not in (*EXPLAINED, *NO_KERNEL, *SMOOTH):
            continue
        reason = reason_of(node)
        if reason:
            found[f"{module_of(node)} ({node.op_type})"] = reason
    return found


def reason_of(node: ir.Node) -> str:
    """Why this op stays float; empty: it does not."""
    if node.op_type in NO_KERNEL:
        return f"onnxruntime has no integer kernel for {node.op_type}"
    if node.op_type in SMOOTH or _is_silu(node):
        x = node.inputs[0]
        made = None
        if x is not None and node.op_type == "Erf":
            made = x.producer()
        x = x if made is None else made.inputs[0]  # GELU: erf(x / sqrt(2))
        if x is None or _input_reason(x):
            return ""  # a float activation between float values: no quantizer asks for integers
        return f"onnxruntime has no integer kernel for {SMOOTH.get(node.op_type, 'SiLU')}"
    if node.op_type == "Softmax" and is_wrong("QLinearSoftmax"):
        return WRONG
    if node.op_type == "Add" and any(_is_constant(value) for value in node.inputs):
        return ""  # a bias, not a residual addition
    for value in node.inputs[:2] if node.op_type in WEIGHTED else node.inputs:
        if value is not None and not _is_stored_as_float(value):
            reason = _input_reason(value)
            if reason:
                return reason
    if NEEDS_OUTPUT[node.op_type]:
        return _output_reason(node.outputs[0])
    return ""


def _is_stored_as_float(value: ir.Value) -> bool:
    """A weight on its grid that `float_weights` has unpacked: its layer is float for another reason."""
    return array_of(value) is not None and str(value.name).endswith("/DQ/out")


def _is_silu(node: ir.Node) -> bool:
    """The Sigmoid of x * sigmoid(x)."""
    users = readers(node.outputs[0]) if node.op_type == "Sigmoid" else []
    return len(users) == 1 and users[0].op_type == "Mul" and node.inputs[0] in users[0].inputs


def _is_constant(value: ir.Value | None) -> bool:
    made = value.producer() if value is not None else None
    return array_of(value) is not None or (made is not None and BIAS_OF in made.metadata_props)


def _input_reason(value: ir.Value) -> str:
    made = made_by(value)
    if made is None or made.op_type != "DequantizeLinear" or made.inputs[0] is None:
        return f"its input {value.name!r} is not quantized"
    kind = made.inputs[0].dtype
    if kind is not None and kind not in BYTES:
        return f"{kind.name.lower()} has no integer kernel: the values are dequantized first"
    if "axis" in made.attributes and array_of(made.inputs[0]) is None:
        return "its input has a scale per channel; integer kernels take one scale per activation"
    return ""


def _output_reason(value: ir.Value) -> str:
    users = readers(value)
    if value.is_graph_output():
        return "its output is an output of the model"
    if len(users) == 1 and users[0].op_type in FUSED_BEHIND:
        return _output_reason(users[0].outputs[0])
    other = next((u for u in users if u.op_type != "QuantizeLinear"), None)
    if other is not None:
        return f"{module_of(other)} ({other.op_type}) reads its output unquantized"
    if len(users) == 1:
        return ""
    return "its readers quantize it in different ways"
