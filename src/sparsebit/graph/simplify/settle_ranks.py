"""settle_ranks: `x.ndim` becomes a number if the ops in front of it fix it; a check of it that holds is
removed.

timm's norms begin with `torch._assert(x.ndim == 4, ...)`. The check is a second reader of the convolution's
output, which would keep a batch norm from being folded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from sparsebit.graph.ops import op_of
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.simplify.weighted_forms import rank_of

COMPARE: tuple[Callable[[Any, Any], Any], ...] = (
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
)


@graph_pass("settle_ranks", keeps_output=True)
def settle_ranks(gm: fx.GraphModule, ctx: Any = None) -> int:
    changed = 0
    for node in list(gm.graph.nodes):
        if _reads_rank(node, gm):
            changed += _settle(node, rank_of(node.args[0], gm))
        elif node.op == "call_function" and node.target in COMPARE and not node.all_input_nodes:
            changed += _settle(node, node.target(*node.args))
        elif node.op == "call_function" and node.target is torch._assert and node.args[0] is True:
            gm.graph.erase_node(node)
            changed += 1
    return changed


def _reads_rank(node: fx.Node, gm: fx.GraphModule) -> bool:
    op = op_of(node, gm)
    return (op is getattr and node.args[1:] == ("ndim",)) or (op is torch.Tensor.dim and len(node.args) == 1)


def _settle(node: fx.Node, value: Any) -> int:
    """Give every reader the number itself."""
    if value is None:
        return 0
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: value if n is node else n)
    node.graph.erase_node(node)
    return 1
