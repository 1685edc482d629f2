"""The layers whose output reaches an addition before another convolution reads it."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.nn.modules.conv import _ConvNd

from sparsebit.graph.ops import ADDS, op_of


def layers_before_additions(gm: fx.GraphModule, oprs: dict[str, Any]) -> set[str]:
    """Paths of masked layers. Every call is visited once, however many additions there are."""
    calls = [node for node in gm.graph.nodes if node.op.startswith("call")]
    todo = [source for node in calls if op_of(node, gm) in ADDS for source in node.all_input_nodes]
    seen = set[fx.Node]()
    found = set[str]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        path = ""
        if node.op == "call_module":
            path = str(node.target)
        if path:
            # a part that is not traced
            found |= {name for name in oprs if name == path or name.startswith(f"{path}.")}
        if not _is_convolution(oprs.get(path)):
            todo += node.all_input_nodes
    return found


def _is_convolution(opr: Any) -> bool:
    """A subclass by the user counts too if it has the weight of a convolution."""
    weight = getattr(opr, "weight", None)
    return isinstance(opr, _ConvNd) or (weight is not None and weight.dim() > 2)
