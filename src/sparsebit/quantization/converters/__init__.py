"""Graph rewriting for users' own flows: `simplify(model)`, `fuse_operations(model, config)`, pattern classes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import fx

from sparsebit.graph.passes import run_passes

# imported before the function of the same name is defined, which must win
from sparsebit.quantization.converters.fuse_operations import FUSE_PASSES
from sparsebit.quantization.converters.simplifiers import simplify

__all__ = ["fuse_operations", "simplify"]


def fuse_operations(
    model: fx.GraphModule, config: Any, custom_lists: list[str] | None = None
) -> fx.GraphModule:
    """Run the fuse passes that `config` (the SCHEDULE section) switches on, or those named in `custom_lists`."""
    passes = FUSE_PASSES
    if custom_lists is not None:
        passes = [replace(p, when=None) for p in FUSE_PASSES if p.name in custom_lists]
    run_passes(model, passes, SimpleNamespace(config=SimpleNamespace(schedule=config)))
    return model
