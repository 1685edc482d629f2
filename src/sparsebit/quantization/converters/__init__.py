"""Graph rewriting for users' own flows: `simplify(model)`, `fuse_operations(model, config)`, pattern classes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import fx, nn

from sparsebit.graph.passes import run_passes
from sparsebit.graph.simplify import SIMPLIFIERS
from sparsebit.quantization.converters.fuse_operations import (
    FUSE_PASSES,
)  # first: the function takes its name


def simplify(model: nn.Module) -> fx.GraphModule:
    """Run the simplifiers on a GraphModule (a plain module is traced first)."""
    from sparsebit.graph.trace import trace
    from sparsebit.quantization.quant_tracer import QTracer

    gm = model if isinstance(model, fx.GraphModule) else trace(model, QTracer())
    run_passes(gm, SIMPLIFIERS, SimpleNamespace(config=None))
    return gm


def fuse_operations(
    model: fx.GraphModule, config: Any, custom_lists: list[str] | None = None
) -> fx.GraphModule:
    """Run the fuse passes that `config` (the SCHEDULE section) switches on, or those named in `custom_lists`."""
    passes = FUSE_PASSES
    if custom_lists is not None:
        passes = [replace(p, when=None) for p in FUSE_PASSES if p.name in custom_lists]
    run_passes(model, passes, SimpleNamespace(config=SimpleNamespace(schedule=config)))
    return model
