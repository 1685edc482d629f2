"""`x.unbind(d)[i]` becomes `x.select(d, i)`: tensor in, tensor out, which every later step knows."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from sparsebit.graph.passes import graph_pass
from sparsebit.graph.pattern import ANY, Match, Pat, Rule
from sparsebit.graph.rewrite import bypass


def _only_picked_from(m: Match, node: fx.Node) -> bool:
    """Is every use like `parts[3]`? A slice, a loop or a function needs the tuple itself."""
    return all(user.target is operator.getitem and type(user.args[1]) is int for user in node.users)


def _to_selects(m: Match) -> fx.Node | None:
    node = m.anchor
    graph = m.gm.graph
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    for item in list(node.users):
        with graph.inserting_before(item):
            part = graph.call_method("select", (m["x"], dim, item.args[1]))
        part.meta = dict(item.meta)
        bypass(item, part)
    return node


_UNBIND = Pat((torch.unbind, torch.Tensor.unbind), Pat(ANY, name="x"), where=_only_picked_from)


@graph_pass("unbind_getitem_to_subtensor", keeps_output=True)
def unbind_getitem_to_subtensor(gm: fx.GraphModule, ctx: Any) -> int:
    return Rule("unbind_getitem_to_subtensor", _UNBIND, _to_selects).apply(gm)
