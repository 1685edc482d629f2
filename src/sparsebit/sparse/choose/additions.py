"""Which layers are on the way to an addition: up to the last convolution before it, through everything in between."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.nn.modules.conv import _ConvNd

from sparsebit.graph.ops import ADDS, op_of


def layers_before_additions(gm: fx.GraphModule, oprs: dict[str, Any]) -> set[str]:
    """Paths of masked layers. Every call is looked at once, however many additions there are."""
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
            found |= {
                name for name in oprs if name == path or name.startswith(f"{path}.")
            }  # a part not traced
        if not _is_convolution(oprs.get(path)):
            todo += node.all_input_nodes
    return found


def _is_convolution(opr: Any) -> bool:
    """Also one of the user's own, which has its weight and nothing else of torch's class."""
    weight = getattr(opr, "weight", None)
    return isinstance(opr, _ConvNd) or (weight is not None and weight.dim() > 2)
