"""The form of a graph that channel rules know: weights in modules, torch's own attention blocks opened up."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sparsebit.graph.feeding import own_call
from sparsebit.graph.passes import run_passes
from sparsebit.graph.rewrite import remove_unread_tensors, remove_unused_modules
from sparsebit.graph.simplify.functions_to_modules import functions_to_modules
from sparsebit.graph.trace import LeafTracer, trace
from sparsebit.sparse.trace.attention import attention_mask, closed_blocks, open_blocks
from sparsebit.sparse.trace.running import Call, Runner
from sparsebit.sparse.trace.sharing import Origins, connect, copy_over_same

log = logging.getLogger("sparsebit")


def graph_form(gm: fx.GraphModule, example: Call) -> fx.GraphModule:
    """`gm` with every weight in a module; nn.MultiheadAttention and the blocks around it become ops.

    The tensors stay the same ones, or parts of their memory.
    """
    if closed_blocks(gm):
        opened = copy_over_same(gm)
        open_blocks(opened)
        if _same(opened, gm, example):
            gm = trace(opened, FormTracer(), example).eval()
            connect(gm, opened, Origins(gm, opened).links(gm))  # who made `gm` knows its tensors
    _Ranks(gm).run_on(gm, example)
    run_passes(gm, [functions_to_modules])
    remove_unread_tensors(gm)  # weights that are in a module now
    remove_unused_modules(gm)
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    gm._tracer_cls = gm.graph._tracer_cls = CodeTracer
    return gm


class _Ranks(Runner):
    """Tells the nodes how many axes their values have: a batch norm over 4 is a BatchNorm2d."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            n.meta["val"] = torch.empty(value.shape, device="meta")
        return value


class FormTracer(LeafTracer):
    """Masks of attention are one node."""

    def __init__(self) -> None:
        super().__init__()
        self._autowrap_function_ids.add(id(attention_mask))


class CodeTracer(FormTracer):
    """Torch unpickles a graph by tracing its code again: this one can, whatever is in it."""

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        with self.prepared_torch():
            graph = super().trace(root, concrete_args)
        for node in graph.nodes:  # torch.fx.wrap would be called again, on names that are no functions
            node.meta.pop("is_wrapped", None)
        return graph


@torch.no_grad()
def _same(opened: fx.GraphModule, gm: fx.GraphModule, example: Call) -> bool:
    """A way of calling attention that the open form does not have keeps its block whole."""
    try:
        if _agree(opened.eval(), gm.eval(), example):
            return True
        # in half precision both are far from exact: with more digits they are equal, or they differ
        wide = lambda t: t.double() if t.is_floating_point() else t
        doubled = pytree.tree_map_only(Tensor, wide, example)
        return _agree(copy.deepcopy(opened).double(), copy.deepcopy(gm).double(), doubled)
    except Exception as error:
        log.info("attention blocks stay closed, and whole: %s: %s", type(error).__name__, error)
        return False


def _agree(opened: fx.GraphModule, gm: fx.GraphModule, example: Call) -> bool:
    calls = [(m, own_call(*example)) for m in (opened, gm)]
    got, want = (pytree.tree_leaves(m(*args, **kwargs)) for m, (args, kwargs) in calls)
    pairs = [(a, b) for a, b in zip(got, want) if isinstance(b, Tensor)]
    return len(got) == len(want) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True) for a, b in pairs
    )
