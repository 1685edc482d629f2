"""The batch of an ONNX file is free, so that it takes any number of samples, unless the model itself forbids it."""

from __future__ import annotations

from typing import Any

from sparsebit.cli.inputs.inputs import example_of
from sparsebit.cli.terminal.output import say


def free_batch(model: Any, batch: Any, quiet: bool = False) -> tuple[Any, dict[str, Any] | None]:
    """The batch to export with, and dynamic_axes for the first axis of its inputs; None: the file takes this size only.

    torch's exporter takes a size of one for a constant, so a batch of one is doubled.
    """
    axes, why = _axes(model, batch)
    wide = batch
    if axes and _sizes(model, batch) == {1}:
        wide = _doubled(batch)
        axes, why = (axes, "") if _runs(model, wide) else (None, "the model does not run on two samples")
        wide = wide if axes else batch
    if why and not quiet:
        say(f"the ONNX file takes only batches of this size: {why}")
    return wide, axes


def _axes(model: Any, batch: Any) -> tuple[dict[str, Any] | None, str]:
    """dynamic_axes, or why there are none."""
    named = _named(model, batch)
    sizes = _sizes(model, batch)
    if not sizes or len(sizes) != 1 or 0 in sizes:
        return None, "not every input is a tensor with the samples along its first axis"
    return {name: {0: "batch"} for name in named}, ""


def _named(model: Any, batch: Any) -> dict[str, Any]:
    from sparsebit.graph.run.signature import signature_of

    example = example_of(model, batch)
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    return dict(signature_of(model).bind(*args, **kwargs).arguments)


def _sizes(model: Any, batch: Any) -> set[int]:
    """The sizes of the first axes; 0 for a value without axes."""
    import torch

    values = _named(model, batch).values()
    found: set[int] = set()
    for v in values:
        found.add(v.shape[0] if isinstance(v, torch.Tensor) and v.dim() else 0)
    return found


def _doubled(batch: Any) -> Any:
    """Every sample twice, labels too."""
    import torch
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(torch.Tensor, lambda x: torch.cat([x, x]) if x.dim() else x, batch)


def _runs(model: Any, batch: Any) -> bool:
    import torch

    example = example_of(model, batch)
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception:  # whatever the user's forward raises
        return False
    return True
