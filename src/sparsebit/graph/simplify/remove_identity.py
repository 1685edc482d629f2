"""Remove nn.Identity, unless its attribute `remove` is False (the user wants a quantizer there)."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from sparsebit.graph.ops import module_of
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.pattern import ANY, Match, Pat, Rule


def _removable(m: Match, node: fx.Node) -> bool:
    module = module_of(node, m.gm)
    # a subclass with another forward is not an identity
    return getattr(module, "remove", True) is not False and type(module).forward is nn.Identity.forward


def _skip(m: Match) -> fx.Node | None:
    (value,) = (*m.anchor.args, *m.anchor.kwargs.values())
    if isinstance(value, fx.Node):
        return value
    return m.decline("its input is a list of nodes")


@graph_pass("remove_identity", keeps_output=True)
def remove_identity(gm: fx.GraphModule, ctx: Any) -> int:
    return Rule("remove_identity", Pat(nn.Identity, ANY, where=_removable), _skip).apply(gm)
