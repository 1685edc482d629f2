"""The form of a graph that channel rules know: weights in modules, torch's attention blocks opened."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, fx

from sparsebit.graph.passes import run_passes
from sparsebit.graph.rewrite import remove_unread_tensors, remove_unused_modules
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.compare import difference_of_models
from sparsebit.graph.run.interpreter import Runner
from sparsebit.graph.simplify.functions_to_modules import functions_to_modules
from sparsebit.graph.trace import LeafTracer, trace
from sparsebit.sparse.trace.attention import attention_mask, closed_blocks, open_blocks
from sparsebit.sparse.trace.sharing import Origins, connect, copy_over_same

log = logging.getLogger("sparsebit")


def graph_form(gm: fx.GraphModule, example: Call) -> fx.GraphModule:
    """`gm` with every weight in a module; nn.MultiheadAttention and the blocks around it become ops.

    The tensors stay the same objects, or parts of their memory.
    """
    if closed_blocks(gm):
        opened = copy_over_same(gm)
        open_blocks(opened)
        if _same(opened, gm, example):
            gm = trace(opened, FormTracer(), example).eval()
            # the caller of this function knows the tensors of `gm`
            connect(gm, opened, Origins(gm, opened).links(gm))
    Runner(gm, _note_rank).run_on(example)
    run_passes(gm, [functions_to_modules])
    remove_unread_tensors(gm)  # weights that a module holds now
    remove_unused_modules(gm)
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    gm._tracer_cls = gm.graph._tracer_cls = CodeTracer
    return gm


def _note_rank(node: fx.Node, value: Any) -> None:
    """Store the shape of a value in its node: a batch norm over four axes becomes a BatchNorm2d."""
    if isinstance(value, Tensor):
        node.meta["val"] = torch.empty(value.shape, device="meta")


class FormTracer(LeafTracer):
    """Makes masks of attention one node."""

    def __init__(self) -> None:
        super().__init__()
        self._autowrap_function_ids.add(id(attention_mask))


class CodeTracer(FormTracer):
    """torch unpickles a graph by a new trace of its code. This tracer accepts every graph."""

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        with self.prepared_torch():
            graph = super().trace(root, concrete_args)
        for node in graph.nodes:  # torch.fx.wrap would be called again, on names that are no functions
            node.meta.pop("is_wrapped", None)
        return graph


def _same(opened: fx.GraphModule, gm: fx.GraphModule, example: Call) -> bool:
    """Do both compute the same? The open form does not know every way to call attention."""
    opened.eval()
    gm.eval()
    try:
        if difference_of_models(opened, gm, example) is None:
            return True
        # In half precision both are far from exact. In float64 they are equal, or one of them is wrong.
        return difference_of_models(opened, gm, example, digits=True) is None
    except Exception as error:  # any error of the open form: the closed one is used in its place
        log.info("attention blocks stay closed and whole: %s: %s", type(error).__name__, error)
        return False
