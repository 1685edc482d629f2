"""Pickle a GraphModule together with the meta data of its nodes.

torch pickles the code of a graph and traces it again, which loses `meta` of the graph and of its nodes. Here
the nodes themselves are stored.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

OF_CODE = ("_graph", "_code", "_lineno_map", "_prologue_start")  # recompile() makes these
# fake tensors, and notes of torch.export
OF_TRACE = ("val", "example_value", "tensor_meta", "from_node")


@dataclass(frozen=True)
class _Ref:
    """Another node, by its name."""

    name: str


class Picklable:
    """Takes the place of a GraphModule in the state of its owner. Unpickling or copying it gives the
    GraphModule."""

    def __init__(self, gm: fx.GraphModule):
        self.gm = gm

    def __reduce__(self) -> Any:
        return from_data, (to_data(self.gm),)

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        return from_data(copy.deepcopy(to_data(self.gm), memo))


def to_data(gm: fx.GraphModule) -> dict[str, Any]:
    """The graph as plain values, and the state of the module."""
    as_ref = lambda value: fx.node.map_aggregate(value, _without_node)
    nodes = []
    for n in gm.graph.nodes:
        nodes.append(
            {
                "call": (n.op, n.target, as_ref(n.args), as_ref(n.kwargs), n.name, n.type),
                "meta": {key: value for key, value in n.meta.items() if key not in OF_TRACE},
            }
        )
    state = {key: value for key, value in vars(gm).items() if key not in OF_CODE}
    return {"name": type(gm).__name__, "nodes": nodes, "codegen": gm.graph._codegen, "state": state}


def _without_node(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return _Ref(value.name)
    return value


def from_data(data: dict[str, Any]) -> fx.GraphModule:
    graph = fx.Graph()
    graph.set_codegen(data["codegen"])
    made: dict[str, fx.Node] = {}
    as_node = lambda value: made[value.name] if isinstance(value, _Ref) else value
    for saved in data["nodes"]:
        op, target, args, kwargs, name, kind = saved["call"]
        args, kwargs = (fx.node.map_aggregate(value, as_node) for value in (args, kwargs))
        made[name] = graph.create_node(op, target, args, kwargs, name, kind)
        made[name].meta.update(saved["meta"])
    root = nn.Module()
    root.__dict__.update(data["state"])
    gm = fx.GraphModule(root, graph, data["name"])
    gm.__dict__.update(data["state"])  # hooks, aliases, and modules without a call
    return gm
