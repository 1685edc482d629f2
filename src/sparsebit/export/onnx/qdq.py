"""QuantizeLinear / DequantizeLinear: how marks become nodes, the same for every runtime that reads QDQ.

A weight is stored as integers behind a DequantizeLinear; an activation passes QuantizeLinear and
DequantizeLinear. Both compute what `fake_quantize` computes: divide, round half to even, saturate. Where the type
is wider than the grid, a Clip of the codes saturates.
"""

from __future__ import annotations

import json
from dataclasses import replace as replaced
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from sparsebit.errors import ExportError
from sparsebit.export.onnx.graph_edit import call_of, constant, insert, marks_in, name_of, replace
from sparsebit.export.onnx.lowered import Clip, Lowered, Site
from sparsebit.export.onnx.marks import Mark, Marks
from sparsebit.export.onnx.packed_weights import TRANSPOSED
from sparsebit.export.onnx.types import container, container_bits
from sparsebit.numeric import QParams, QuantSpec, quantize_to_int
from sparsebit.numeric.spec import channel_axis

FLOAT = ir.DataType.FLOAT


def lower_marks(model: ir.Model, marks: Marks) -> Lowered:
    """Replace every FakeQuant node; refuse if a quantizer got lost or an unknown one turned up."""
    lowered = Lowered()
    seen: set[str] = set()
    for node in sorted(marks_in(model), key=call_of):
        name = name_of(node)
        if name not in marks:
            raise ExportError(f"{name}: is in the exported graph, but is not a quantizer of the model")
        seen.add(name)
        site = (_lower_weight if marks[name].is_weight else _lower_activation)(node, marks[name])
        if "copy" not in node.metadata_props:
            lowered.sites.append(replaced(site, hoisted="hoisted" in node.metadata_props))
    lost = sorted(set(marks) - seen)
    if lost:
        raise ExportError(
            f"{', '.join(lost[:5])}{' ...' if len(lost) > 5 else ''}: quantizers that are not in the exported graph; "
            f"the exporter dropped the ops they belong to, or the dummy input does not reach them"
        )
    model.opset_imports.pop("sparsebit", None)
    return lowered


def clip_of(node: ir.Node) -> Clip:
    """The clip in front of a mark that `rewrites.absorb_clips` took in."""
    low, high = json.loads(node.metadata_props.get("clip", "[null, null]"))
    return low, high


def codes_of(value: float, mark: Mark) -> torch.Tensor:
    """The codes that one value gets on the grid of every channel."""
    scale, zero_point = _on_cpu(mark)
    spec = QuantSpec(mark.spec.bits, mark.spec.symmetric, 0, mark.spec.narrow)
    return quantize_to_int(torch.full_like(scale, value), QParams(scale, zero_point), spec)


def _on_cpu(mark: Mark) -> tuple[torch.Tensor, torch.Tensor]:
    return mark.qparams.scale.detach().cpu().float(), mark.qparams.zero_point.detach().cpu().float().round()


def grid(
    graph: ir.Graph, mark: Mark, stem: str, ndim: int, transposed: bool = False
) -> tuple[ir.Value, ir.Value, dict[str, Any]]:
    """Scale and zero point as initializers, and the attributes that describe their place."""
    scale, zero = (t.numpy() for t in _on_cpu(mark))
    axis = channel_axis(ndim, mark.spec.axis) if scale.size > 1 else None
    shape: tuple[int, ...] = () if axis is None else (-1,)  # runtimes want a scalar, not a vector of one
    if axis is None:
        attributes = {}
    else:
        attributes = {"axis": 1 - axis if transposed else axis}
    if mark.spec.group is not None and mark.weight is not None:
        shape = (len(mark.weight), -1)
        attributes = {"axis": 0 if transposed else 1, "block_size": mark.spec.group}
    codes = zero.reshape(shape).astype(np.int32).astype(container(mark))
    scale = scale.reshape(shape)
    if transposed:
        codes = codes.T
        scale = scale.T
    return (
        constant(graph, f"{stem}/scale", scale),
        constant(graph, f"{stem}/zero_point", codes),  # a copy, because onnxruntime may replace it
        attributes,
    )


def _lower_weight(node: ir.Node, mark: Mark) -> Site:
    graph = node.graph
    after = f"{mark.name}/DQ/out"
    assert isinstance(graph, ir.Graph) and mark.weight is not None
    transposed = TRANSPOSED in node.metadata_props
    known = next((n.outputs[0] for n in graph if n.outputs and n.outputs[0].name == after), None)
    if known is None:
        weight = mark.weight.detach().cpu().float()
        qparams = QParams(*_on_cpu(mark))
        codes = quantize_to_int(weight, qparams, mark.spec).numpy().astype(container(mark))
        stored = constant(graph, f"{mark.name}/codes", codes.T if transposed else codes)
        scale, zero, axis = grid(graph, mark, mark.name, weight.dim(), transposed)
        known = insert(node, "DequantizeLinear", [stored, scale, zero], f"{mark.name}/DQ", axis)
        known.type = ir.TensorType(FLOAT)
        _describe(known, mark)
    replace(node, _cast(node, known, node.outputs[0].dtype, f"{node.name}/back"))
    return Site(mark.name, after, transposed=transposed)


def _lower_activation(node: ir.Node, mark: Mark) -> Site:
    graph = node.graph
    x = node.inputs[0]
    assert isinstance(graph, ir.Graph) and x is not None and x.name is not None
    kind = x.dtype
    stem = mark.name
    calls = 1
    while f"{stem}/scale" in graph.initializers:  # the layer is called again
        stem = f"{mark.name}#{calls}"
        calls = calls + 1
    scale, zero, axis = grid(graph, mark, stem, len(x.shape) if x.shape is not None else 4)
    x = _cast(node, x, FLOAT, f"{stem}/as_float")
    before = x.name or ""  # behind the cast: onnxruntime may compute in float32 and leave out both casts
    if container_bits(mark) > 8:
        x = _clip_values(node, x, mark, stem)
    codes = insert(node, "QuantizeLinear", [x, scale, zero], f"{stem}/Q", axis)
    codes.type = ir.TensorType(ir.DataType.from_numpy(container(mark)))
    codes = _clip_codes(node, codes, mark, stem)
    out = insert(node, "DequantizeLinear", [codes, scale, zero], f"{stem}/DQ", axis)
    out.type = ir.TensorType(FLOAT)
    _describe(out, mark)
    assert out.name is not None
    replace(node, _cast(node, out, kind, f"{stem}/back"))
    return Site(mark.name, out.name, before, clip=clip_of(node))


def _cast(node: ir.Node, x: ir.Value, kind: ir.DataType | None, name: str) -> ir.Value:
    """Grids are float32; a half-precision model computes there, as `fake_quantize` does."""
    if kind is None or kind == (x.dtype or FLOAT):
        return x
    out = insert(node, "Cast", [x], name, {"to": int(kind)})
    out.type = ir.TensorType(kind)
    return out


def _clip_codes(node: ir.Node, codes: ir.Value, mark: Mark, stem: str) -> ir.Value:
    """The type is wider than the grid, or a clip was taken in: saturate where the model does."""
    kind, (low, high) = container(mark), clip_of(node)
    bottom = mark.spec.qmin if low is None else int(codes_of(low, mark))
    top = mark.spec.qmax if high is None else int(codes_of(high, mark))
    limits = np.iinfo(kind)
    if container_bits(mark) > 8 or (bottom <= limits.min and top >= limits.max):
        return codes
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    bounds = []
    for k, v in (("lowest", bottom), ("highest", top)):
        bounds.append(constant(graph, f"{stem}/{k}", np.asarray(v, kind)))
    return insert(node, "Clip", [codes, *bounds], f"{stem}/Clip")


def _clip_values(node: ir.Node, x: ir.Value, mark: Mark, stem: str) -> ir.Value:
    """Codes of 16 bits have no Clip in onnxruntime: saturate before rounding."""
    graph = node.graph
    spec = mark.spec
    assert isinstance(graph, ir.Graph)
    scale, zero = (t.double() for t in _on_cpu(mark))
    ndim = len(x.shape) if x.shape is not None else 4
    axis = channel_axis(ndim, spec.axis) if scale.numel() > 1 else None
    shape: list[int] = [] if axis is None else [-1 if i == axis else 1 for i in range(ndim)]
    for op, what, limit in (("Max", "low", spec.qmin), ("Min", "high", spec.qmax)):
        bound = ((limit - zero) * scale).reshape(shape).numpy().astype(np.float32)
        x = insert(node, op, [x, constant(graph, f"{stem}/{what}", bound)], f"{stem}/{op}")
    return x


def _describe(value: ir.Value, mark: Mark) -> None:
    node = value.producer()
    assert node is not None
    node.metadata_props.update(mark.describe())
