"""`<first>` and `<last>` of SPECIFIC: the layers at the ends of a network, whatever they are called.

A layer with weights is first where no other one is before it, and last where no other one is behind it. The ops that
only a last layer reads through, such as the pool in front of it, belong to it: their input is its input.
"""

from __future__ import annotations

from torch import fx, nn

from sparsebit.graph.ops import is_bookkeeping, module_of
from sparsebit.quantization.modules import MultipleInputsQuantOpr, QuantOpr

FIRST = "<first>"
LAST = "<last>"


def ends(gm: fx.GraphModule) -> dict[nn.Module, list[str]]:
    """The names by which SPECIFIC knows each module of the graph, also inside an island."""
    nodes = [n for n in gm.graph.nodes if _weighted(n, gm)]
    behind = _reach(gm, nodes, forwards=True)
    before = _reach(gm, nodes, forwards=False)
    found: dict[nn.Module, list[str]] = {}
    for node in nodes:
        inside = _weighted(node, gm)
        if node not in behind:
            found.setdefault(inside[0], []).append(FIRST)
        if node not in before:
            found.setdefault(inside[-1], []).append(LAST)
            for op in _readers(node, gm):
                found.setdefault(op, []).append(LAST)
    return found


def _weighted(node: fx.Node, gm: fx.GraphModule) -> list[nn.Module]:
    """The ops of a node whose weights are quantized, in the order in which they were made."""
    if node.op != "call_module":
        return []
    ops = [m for m in module_of(node, gm).modules() if isinstance(m, QuantOpr)]
    return [m for m in ops if m.weight is not None and m.quantize_weight]


def _reach(gm: fx.GraphModule, nodes: list[fx.Node], forwards: bool) -> set[fx.Node]:
    """Nodes that a value of `nodes` reaches, or that reach one of them; themselves only through another."""
    sources = set(nodes)
    reached = set[fx.Node]()
    if forwards:
        order = list(gm.graph.nodes)
    else:
        order = list(reversed(gm.graph.nodes))
    for node in order:
        earlier = node.all_input_nodes if forwards else node.users
        if any(n in sources or n in reached for n in earlier):
            reached.add(node)
    return reached


def _readers(node: fx.Node, gm: fx.GraphModule) -> list[nn.Module]:
    """Ops without weights in front of a layer, each of which only the next one reads."""
    found: list[nn.Module] = []
    while node.args and isinstance(node.args[0], fx.Node):
        reader = node
        node = node.args[0]
        others = [user for user in node.users if user is not reader and not is_bookkeeping(user)]
        if node.op == "placeholder" or others or _weighted(node, gm):
            break
        if node.op == "call_module":
            module = module_of(node, gm)
            if isinstance(module, MultipleInputsQuantOpr):
                break
            found.append(module)
    return found
