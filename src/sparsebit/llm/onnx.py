"""Quantized linears in ONNX: DequantizeLinear in blocks, then MatMul, which onnxruntime fuses to MatMulNBits.

Weights lie as (inputs, outputs) in 4 or 8 bits with scales (groups, outputs): opset 21, `block_size` along axis 0.
What surrounds the layers is exported by torch; each layer's place is held by a MatMul with a float weight meanwhile.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsebit.errors import ExportError
from sparsebit.llm.layers.linear import QuantLinear
from sparsebit.numeric.quantized_weight import QuantizedWeight

OPSET = 21  # the first with blocks and 4-bit integers
FUSED_GROUPS = (16, 32, 64, 128, 256)  # that onnxruntime fuses


def layer_to_onnx(layer: QuantLinear, path: str | Path | None = None) -> Any:
    """A model with one layer, `x` (tokens, inputs) float -> `y`; written to `path` if one is given."""
    onnx = _onnx()
    h = onnx.helper
    nodes, tensors = dequantized(layer.quantized(), "weight")
    nodes.append(h.make_node("MatMul", ["x", "weight"], ["y" if layer.bias is None else "product"]))
    if layer.bias is not None:
        tensors.append(onnx.numpy_helper.from_array(layer.bias.detach().float().cpu().numpy(), "bias"))
        nodes.append(h.make_node("Add", ["product", "bias"], ["y"]))
    kind = onnx.TensorProto.FLOAT
    graph = h.make_graph(
        nodes,
        "layer",
        [h.make_tensor_value_info("x", kind, ["tokens", layer.in_features])],
        [h.make_tensor_value_info("y", kind, ["tokens", layer.out_features])],
        tensors,
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(model)
    if path is not None:
        onnx.save(model, str(path))
    return model


def dequantized(q: QuantizedWeight, name: str) -> tuple[list[Any], list[Any]]:
    """Nodes and constants that make the float matrix (inputs, outputs) called `name`."""
    onnx = _onnx()
    group = q.group or q.shape[1]
    if q.bits not in (4, 8) or q.g_idx is not None or q.shape[1] % group:
        raise ExportError(
            f"{name}: ONNX has blocks of 4 or 8 bits and full groups in order; this layer has {q.bits} bits, "
            f"group {q.group} of {q.shape[1]} inputs{', a g_idx' if q.g_idx is not None else ''}"
        )
    if q.bits == 4:
        kind = onnx.TensorProto.UINT4
    else:
        kind = onnx.TensorProto.UINT8
    names = [f"{name}_codes", f"{name}_scales", f"{name}_zeros"]
    scales = onnx.numpy_helper.from_array(q.scales.float().T.contiguous().cpu().numpy(), names[1])
    tensors = [_integers(onnx, names[0], kind, q.codes.T), scales, _integers(onnx, names[2], kind, q.zeros.T)]
    node = onnx.helper.make_node("DequantizeLinear", names, [name], axis=0, block_size=group)
    return [node], tensors


def to_onnx(model: nn.Module, tokens: Tensor, path: str | Path, **options: Any) -> Any:
    """A whole model: torch exports it with float weights, then each becomes a blocked DequantizeLinear.

    tokens    an example input (batch, length); `options` go to torch.onnx.export (such as dynamic_axes).
    """
    onnx = _onnx()
    plain, marks = _marked(model)
    buffer: Any = io.BytesIO()
    settings = {"input_names": ["tokens"], "output_names": ["logits"], "opset_version": 18, **options}
    with torch.no_grad():
        torch.onnx.export(plain, (tokens,), buffer, dynamo=False, do_constant_folding=True, **settings)
    found = onnx.version_converter.convert_version(onnx.load_from_string(buffer.getvalue()), OPSET)
    found.ir_version = 10
    _replace(onnx, found.graph, marks)
    onnx.checker.check_model(found)
    onnx.save(found, str(path))
    return found


class _Plain(nn.Module):
    """x @ W with W (inputs, outputs): exported as MatMul with a constant that is recognised by its bytes."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__()
        self.matrix = nn.Parameter(layer.quantized().dequantize().T.contiguous(), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.matrix
        return out if self.bias is None else out + self.bias


def _marked(model: nn.Module) -> tuple[nn.Module, dict[bytes, tuple[str, QuantizedWeight]]]:
    """A copy with float products, and which layer each of their constants is."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    if not layers:
        raise ExportError("model: has no QuantLinear; load a quantized checkpoint with llm.load")
    plain = copy.deepcopy(model).float().eval()
    marks = {}
    for name, layer in layers.items():
        product = _Plain(layer)
        marks[_mark(product.matrix.detach().numpy())] = name, layer.quantized()
        owner, _, leaf = name.rpartition(".")
        setattr(plain.get_submodule(owner), leaf, product)
    return plain, marks


def _replace(onnx: Any, graph: Any, marks: dict[bytes, tuple[str, QuantizedWeight]]) -> None:
    nodes = []
    tensors = []
    done = set()
    kept = []
    for tensor in graph.initializer:
        if len(tensor.dims) == 2 and tensor.data_type == onnx.TensorProto.FLOAT:
            mark = _mark(onnx.numpy_helper.to_array(tensor))
            if mark in marks:
                made, constants = dequantized(marks[mark][1], tensor.name)
                nodes += made
                tensors += constants
                done.add(mark)
                continue
        kept.append(tensor)
    missing = [name for mark, (name, _) in marks.items() if mark not in done]
    if missing:
        raise ExportError(
            f"{missing[0]}: torch.onnx did not keep its weight as one constant; export it alone"
        )
    others = list(graph.node)
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(kept + tensors)
    graph.node.extend(nodes + others)


def _mark(values: Any) -> bytes:
    import hashlib

    return hashlib.sha256(repr(values.shape).encode() + np.ascontiguousarray(values).tobytes()).digest()


def _integers(onnx: Any, name: str, kind: int, values: Tensor) -> Any:
    """Two 4-bit values in a byte, the first in its low half."""
    flat = values.contiguous().flatten().cpu().numpy().astype(np.uint8)
    if kind == onnx.TensorProto.UINT4:
        flat = np.pad(flat, (0, len(flat) % 2))
        flat = (flat[0::2] | (flat[1::2] << 4)).astype(np.uint8)
    return onnx.helper.make_tensor(name, kind, list(values.shape), flat.tobytes(), raw=True)


def _onnx() -> Any:
    try:
        import onnx
        import onnx.version_converter
    except ImportError:
        raise ExportError("onnx is not installed: pip install sparsebit[onnx]") from None
    return onnx
