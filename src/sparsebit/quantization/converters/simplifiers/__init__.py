"""Legacy: `simplify(model)` of the original API: the passes of `sparsebit.graph.simplify`."""

from __future__ import annotations

from torch import fx, nn

from sparsebit.graph.passes import run_passes
from sparsebit.graph.simplify import SIMPLIFIERS
from sparsebit.graph.trace.from_module import trace
from sparsebit.quantization.converters.tasks import passes_named

__all__ = ["SIMPLIFIERS", "simplify"]


def simplify(model: nn.Module) -> fx.GraphModule:
    """Bring a model into the form that the later passes expect: a GraphModule in place, a plain module traced."""
    from sparsebit.quantization.converters.simplifiers.lists import lists
    from sparsebit.quantization.quant_tracer import QTracer

    if isinstance(model, fx.GraphModule):
        gm = model
    else:
        gm = trace(model, QTracer())
    run_passes(gm, passes_named(lists, SIMPLIFIERS, __name__))
    return gm
