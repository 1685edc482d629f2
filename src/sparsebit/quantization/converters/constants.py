"""The values of a graph that are the same for every batch: parameters, buffers, new tensors, and values computed from
these.

Runtimes compute them once, when they load a file: quantizers there would cost accuracy and gain nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx, nn

from sparsebit.graph.ops import called_module, module_of, name_of, writes_input
from sparsebit.quantization.modules import MultipleInputsQuantOpr, Opr, QuantOpr, find_qmodule
from sparsebit.quantization.modules.base import Value
from sparsebit.quantization.modules.embedding import QEmbedding, QEmbeddingBag
from sparsebit.quantization.modules.float_ops.create import Create, Random
from sparsebit.quantization.modules.float_ops.python_builtins import QGetAttr, reads_property
from sparsebit.quantization.modules.shape import Expand_as, Reshape
from sparsebit.quantization.modules.unary import Cast

WHY_FLOAT = "reads only constants: computed once"
# a Python value such as a size; parameters and buffers, and values computed from them; with new tensors in it; any
# other
NUMBER, STORED, CREATED, VARIES = range(4)
FIRST_DECIDES = (Cast, Expand_as, Reshape)  # x.type_as(y), x.view_as(y): only x gives values
# they read constants by nature, and a quantized table makes the file smaller
TABLES = QEmbedding, QEmbeddingBag


def on_constants(gm: fx.GraphModule, most: int = CREATED) -> set[fx.Node]:
    """The calls of ops with quantizers that read only constants; with STORED, only parameters and buffers."""
    kinds = {node for node, kind in _kinds(gm).items() if NUMBER < kind <= most}
    return {node for node in kinds if _has_quantizers(node, gm)}


def only_on_constants(gm: fx.GraphModule) -> set[fx.Node]:
    """The calls of layers that read nothing else anywhere."""
    found = on_constants(gm)
    calls = (node for node in gm.graph.nodes if node.op == "call_module" and node not in found)
    mixed = {id(module_of(node, gm)) for node in calls}
    return {node for node in found if node.op != "call_module" or id(module_of(node, gm)) not in mixed}


def _has_quantizers(node: fx.Node, gm: fx.GraphModule) -> bool:
    cls = _class_of(node, gm)
    return cls is not None and issubclass(cls, (QuantOpr, MultipleInputsQuantOpr)) and cls not in TABLES


def _class_of(node: fx.Node, gm: fx.GraphModule) -> type[nn.Module] | None:
    """The QModule of a node, or the one that would replace it."""
    module = called_module(node, gm)
    if isinstance(module, Opr):
        return type(module)
    return find_qmodule(node, gm)


def _kinds(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """The kind of every value. A value that is written into counts as variable from the start."""
    written = _written(gm)
    kinds: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        kinds[node] = VARIES if node in written else _kind(node, gm, kinds)
    return kinds


def _kind(node: fx.Node, gm: fx.GraphModule, kinds: dict[fx.Node, int]) -> int:
    if node.op == "get_attr":
        return STORED
    cls = _class_of(node, gm) if node.op.startswith("call") else None
    if cls is None or issubclass(cls, Random):
        return VARIES
    if issubclass(cls, Value) or (issubclass(cls, QGetAttr) and reads_property(node)):
        return NUMBER
    least = CREATED if issubclass(cls, Create) else NUMBER
    return max([least, *(kinds[value] for value in _sources(node, cls))])


def _sources(node: fx.Node, cls: type[nn.Module]) -> list[fx.Node]:
    """The inputs whose values the output is made of: not the one that gives only a shape or a dtype."""
    if issubclass(cls, FIRST_DECIDES):
        return node.all_input_nodes[:1]
    name = name_of(node)
    only_shape = issubclass(cls, Create) and (name.startswith("new_") or name.endswith("_like"))
    return [value for value in node.all_input_nodes if not only_shape or value is not node.args[0]]


def _written(gm: fx.GraphModule) -> set[fx.Node]:
    """Values that something in the graph writes into, with all they were made from: a view shares its memory."""
    writers = (node for node in gm.graph.nodes if node.op.startswith("call") and writes_input(node, gm))
    return _with_sources(node.args[0] for node in writers if node.args and isinstance(node.args[0], fx.Node))


def _with_sources(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found
