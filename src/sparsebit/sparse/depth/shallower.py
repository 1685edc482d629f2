"""A model with fewer layers, for `prune_blocks(merge=, depth=)` or a plan."""

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
    """The model with merged blocks and without some branches, and the names of both."""
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
