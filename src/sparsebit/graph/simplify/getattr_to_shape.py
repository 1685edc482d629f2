"""One form for sizes: `x.shape` becomes `x.size()`; `x.shape[1]` and `x.size()[1]` become `x.size(1)`.

Slices and computed indices stay on top of `x.size()`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from sparsebit.graph.passes import graph_pass
from sparsebit.graph.pattern import ANY, Match, Pat, Rule


def _is_shape(m: Match, node: fx.Node) -> bool:
    return node.args[1:] == ("shape",)


def _is_int_index(m: Match, node: fx.Node) -> bool:
    return type(node.args[1]) is int


def _to_size(m: Match) -> fx.Node:
    with m.gm.graph.inserting_before(m.anchor):
        return m.gm.graph.call_method("size", (m["x"],))


def _to_size_of_dim(m: Match) -> fx.Node:
    with m.gm.graph.inserting_before(m.anchor):
        return m.gm.graph.call_method("size", (m["x"], m.anchor.args[1]))


_X = Pat(ANY, name="x")
_SHAPE = Pat(getattr, _X, where=_is_shape)
_DIM = Pat(operator.getitem, Pat(torch.Tensor.size, _X, shared=True), where=_is_int_index)


@graph_pass("getattr_to_shape", keeps_output=True)
def getattr_to_shape(gm: fx.GraphModule, ctx: Any) -> int:
    whole = Rule("shape_to_size", _SHAPE, _to_size).apply(gm)
    return whole + Rule("size_of_dim", _DIM, _to_size_of_dim).apply(gm)
