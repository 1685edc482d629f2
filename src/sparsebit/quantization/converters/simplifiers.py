"""`simplify(model)` of the original API: the passes of `sparsebit.graph.simplify`."""

from __future__ import annotations

from torch import fx

from sparsebit.graph.passes import run_passes
from sparsebit.graph.simplify import SIMPLIFIERS


def simplify(model: fx.GraphModule) -> fx.GraphModule:
    """Bring a traced model into the form that the later passes expect, in place."""
    run_passes(model, SIMPLIFIERS)
    return model
