"""A model made shallower, as `prune(merge=, depth=)` asks for it or as a plan has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from sparsebit.sparse.depth.merge_blocks import merge as merge_blocks
from sparsebit.sparse.depth.shorten_branches import shorten


def shallower(
    model: nn.Module,
    example: Any,
    merge: int | str | Sequence[str],
    depth: int | Sequence[str],
    batches: Any = None,
    progress: bool | None = None,
) -> tuple[nn.Module, dict[str, list[str]]]:
    """The model with blocks merged and branches gone, and which."""
    done: dict[str, Any] = {"merged": [], "shortened": []}
    if merge:
        merged = merge_blocks(model, example, merge, batches, progress)
        done["merged"] = merged.merged
        if merged.merged:
            model = merged
    if depth:
        model = shorten(model, example, depth, batches, progress)
        done["shortened"] = model.shortened
    return model, done
