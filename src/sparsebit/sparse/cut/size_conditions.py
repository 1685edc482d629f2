"""Does an `if` of the forward depend on the number of channels?

After the cut, the user's class would then take another branch for some inputs. The graph keeps the branch of
the whole model.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from sparsebit.graph.ops import argument, name_of
from sparsebit.graph.trace.guards import as_decided
from sparsebit.sparse.cut.surgery import Cut

NO_SIZES = ("dim", "ndim", "dtype", "is_floating_point", "is_complex", "layout")


def asks_for_cut_sizes(cut: Cut) -> bool:
    checks = [node for node in cut.walk.gm.graph.nodes if node.target is as_decided]
    return any(_is_cut(cut, node) for check in checks for node in _conditions(cut, check))


def _conditions(cut: Cut, check: fx.Node) -> Iterator[fx.Node]:
    """Every node that a decision is computed from, up to the nodes that read a tensor."""
    seen = set[fx.Node]()
    waiting = list(check.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen and not isinstance(cut.walk.values[node], Tensor):
            seen.add(node)
            waiting.extend(node.all_input_nodes)
            yield node


def _is_cut(cut: Cut, node: fx.Node) -> bool:
    """Does the node read a size that is smaller after the cut?"""
    asked: Any = slice(None)  # numel and the like read all sizes
    source = next(iter(node.all_input_nodes), node)
    if node.target is operator.getitem and _is_shape(source):
        source = source.all_input_nodes[0]
        asked = node.args[1]
    elif node.target == "size":
        asked = argument(node, 1, "dim", asked)
    if node.target is getattr:
        what = node.args[1]
    else:
        what = name_of(node)
    one_by_one = _is_shape(node) and all(user.target is operator.getitem for user in node.users)
    labels = cut.walk.of.get(source)
    if one_by_one or what in NO_SIZES or not isinstance(labels, Tensor):
        return False
    lost = cut.axes(labels)
    axes = range(labels.dim())
    return any(axis in lost for axis in (axes[asked] if isinstance(asked, slice) else [axes[asked]]))


def _is_shape(node: fx.Node) -> bool:
    """`x.shape`, `x.size()`"""
    whole = node.target == "size" and argument(node, 1, "dim") is None
    return whole or (node.target is getattr and node.args[1] == "shape")
