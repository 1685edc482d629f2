"""Small edits on an onnx_ir graph, and the few questions that lowering asks about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from sparsebit.export.onnx.marks import CALL, DOMAIN, KEY, OP

SCOPES = "pkg.torch.onnx.name_scopes"  # torch's exporter writes the modules around a node there
MODULE = "sparsebit.module"  # in a finished file: the innermost of them


def attribute_of(node: ir.Node, name: str, default: Any) -> Any:
    """The value of an attribute, or `default` if the node does not have it."""
    found = node.attributes.get(name)
    if found is None:
        return default
    return found.value


def is_mark(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == OP and node.domain == DOMAIN


def marks_in(model: ir.Model) -> list[ir.Node]:
    """The FakeQuant nodes, in the order of the graph."""
    return [n for n in model.graph if is_mark(n)]


def name_of(node: ir.Node) -> str:
    return str(node.attributes[KEY].value)


def call_of(node: ir.Node) -> int:
    """Which of the calls of its quantizer a mark is."""
    if CALL in node.attributes:
        return int(node.attributes[CALL].value)
    return 0


def constant(graph: ir.Graph, name: str, array: Any) -> ir.Value:
    """A new initializer."""
    tensor = ir.tensor(np.asarray(array, order="C"), name=name)
    value = ir.Value(
        name=name, shape=ir.Shape(tensor.numpy().shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def array_of(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """The numbers of a constant value, or None."""
    if value is None:
        found = None
    else:
        found = ir.convenience.get_const_tensor(value)
    return None if found is None else found.numpy()


def insert(
    before: ir.Node,
    op: str,
    inputs: Sequence[ir.Value | None],
    name: str,
    attributes: dict[str, Any] | None = None,
) -> ir.Value:
    """A new node in front of another; its single output, named like the node."""
    node = ir.node(op, inputs, attributes=attributes or {}, name=name)
    out = node.outputs[0]
    first = inputs[0]
    for key in (SCOPES, MODULE):  # it belongs to the same module
        if key in before.metadata_props:
            node.metadata_props[key] = before.metadata_props[key]
    out.name = f"{name}/out"
    if first is not None:
        # right for most ops; others set their own
        out.type = first.type
        out.shape = first.shape
    assert before.graph is not None
    before.graph.insert_before(before, [node])
    return out


def replace(node: ir.Node, value: ir.Value) -> None:
    """All readers of the node's output read `value` instead. The node is removed; a graph output keeps its name."""
    old = node.outputs[0]
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    value.shape = value.shape or old.shape
    value.type = value.type or old.type
    for i, out in enumerate(graph.outputs):
        if out is old:
            name = old.name
            old.name = None
            graph.outputs[i] = insert(node, "Identity", [value], f"{name}/end")
            graph.outputs[i].name = name
    old.replace_all_uses_with(value)
    graph.remove(node, safe=True)


def without_marks(model: ir.Model) -> ir.Model:
    """A copy that computes in float."""
    copy = ir.from_proto(ir.to_proto(model))
    assert isinstance(copy, ir.Model)
    for node in marks_in(copy):
        source = node.inputs[0]
        assert source is not None
        replace(node, source)
    clean(copy)
    return copy


def readers(value: ir.Value) -> list[ir.Node]:
    return [use.node for use in value.uses()]


def made_by(value: ir.Value | None) -> ir.Node | None:
    """The node that computes a value; looks through the Sum of one value (rewrites.keep_apart), Transpose, Reshape."""
    node = value.producer() if value is not None else None
    while node is not None and (
        node.op_type in ("Transpose", "Reshape") or (node.op_type == "Sum" and len(node.inputs) == 1)
    ):
        source = node.inputs[0]
        node = source.producer() if source is not None else None
    return node


def module_of(node: ir.Node) -> str:
    """The path of the module that a node belongs to, or the node's own name."""
    if MODULE in node.metadata_props:
        return node.metadata_props[MODULE]
    names = [s.strip(" '\"") for s in node.metadata_props.get(SCOPES, "").strip("[]").split(",")]
    return next((n for n in reversed(names[:-1]) if n), None) or str(node.name)


def clean(model: ir.Model) -> None:
    """Remove values without a reader, and stack traces of this machine; the module of each node is kept."""
    import onnx_ir.passes.common as common

    common.RemoveUnusedNodesPass()(model)
    for node in model.graph:
        known = {key: text for key, text in node.metadata_props.items() if key.startswith("sparsebit.")}
        path = module_of(node)
        node.metadata_props.clear()
        node.metadata_props.update({MODULE: path} | known if path != node.name else known)
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.graph.metadata_props.clear()
