"""`with torch.no_grad():` in a traced forward: torch.fx drops it, and two calls around the block keep it."""

from __future__ import annotations

import torch
from torch import fx

from sparsebit.graph.ops import bookkeeping


@bookkeeping
def begin_no_grad() -> bool:
    """Switch gradients off; returns the state before."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    return before


@bookkeeping
def end_no_grad(before: bool) -> None:
    torch._C._set_grad_enabled(before)


def bracket_no_grad(graph: fx.Graph) -> None:
    """Put the two calls around each run of nodes that were recorded without gradients."""
    begin: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr"):
            continue
        if node.meta.get("no_grad") and begin is None:
            with graph.inserting_before(node):
                begin = graph.call_function(begin_no_grad)
        elif not node.meta.get("no_grad") and begin is not None:
            with graph.inserting_before(node):
                graph.call_function(end_no_grad, (begin,))
            begin = None
