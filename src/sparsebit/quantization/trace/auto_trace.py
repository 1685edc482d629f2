"""trace="auto": torch.fx first, then torch.export if it makes more of the model integer.

The second trace costs time. So it is only tried if torch.fx leaves islands whose multiplications are not all integers.
The front-end of torch.export compares its graph with the model on the example. The graph is taken if it still accepts
batches of any size, and if more multiplications become integer (quantized, for backends that are simulated). If
quantizers learn, torch.fx stays: the graph of torch.export has no dropout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sparsebit.export.backends import BACKENDS
from sparsebit.quantization.analysis.preflight import preflight
from sparsebit.quantization.layers import as_calls, undisturbed

log = logging.getLogger("sparsebit")
FOR_CALIBRATION = ("uniform", "adaround")
CHOICE = "front_end"  # in the meta of the graph: why torch.export was taken, or not, for the report


def choose_front_end(qmodel: Any, example: Any, by_export: Callable[[], Any]) -> Any:
    """`qmodel`, which torch.fx has traced, or the one that `by_export` builds; the reason is in its graph's meta."""
    if not qmodel.islands or _learns(qmodel):
        return qmodel
    try:
        before = preflight(qmodel, example).totals
    except Exception as error:  # the example does not run: calibration gives the clearest error
        log.debug("trace: the example does not run: %s", error)
        return qmodel
    counted = _counted(qmodel)
    if before[counted] >= before["macs"]:
        return qmodel
    shown = ", ".join(path or "the whole model" for path in list(qmodel.islands)[:2])
    more = len(qmodel.islands) - 2
    parts = shown + (f" and {more} more parts" if more > 0 else "")
    try:
        other = by_export()
        after = preflight(other, example).totals
    except Exception as error:  # torch.export fails in many ways; the graph of torch.fx is there
        first = (str(error).splitlines() or [""])[0]
        return _stays(qmodel, parts, f"torch.export does not take the model either: {first[:200]}")
    kept = _sizes_kept(other, qmodel, example)
    if kept:
        return _stays(qmodel, parts, f"the graph of torch.export takes only {kept} of the example")
    if _share(after, counted) <= _share(before, counted):
        return _stays(qmodel, parts, "torch.export makes no more of the MACs integer")
    other.model.meta[CHOICE] = (
        f"traced by torch.export, because torch.fx cannot trace {parts}: {_share(after, counted):.0%} of the MACs "
        f"{_word(counted)} in place of {_share(before, counted):.0%}. Images keep the height and width of the "
        f'example, and dropout stays off; not so with trace="fx"'
    )
    log.info("%s", other.model.meta[CHOICE])
    return other


def has_other_sizes(batches: Any) -> bool:
    """Do listed batches differ in more than the number of samples? torch.export keeps the sizes of images."""
    if not isinstance(batches, (list, tuple)):
        return False
    shapes = set()
    for b in batches:
        shapes.add(tuple(x.shape[1:] for x in pytree.tree_leaves(b) if isinstance(x, Tensor)))
    return len(shapes) > 1


def _sizes_kept(by_export: Any, by_fx: Any, example: Any) -> str:
    """Which size of the example the graph of torch.export takes only, where that of torch.fx takes others."""
    (call,) = as_calls(by_fx.model, [example])
    for what, doubled in (("the batch size", _batch_doubled), ("the length", _length_doubled)):
        args, kwargs = pytree.tree_map_only(Tensor, doubled, call)
        if _runs(by_fx.model, args, kwargs) and not _runs(by_export.model, args, kwargs):
            return what
    return ""


def _batch_doubled(x: Tensor) -> Tensor:
    return torch.cat([x, x]) if x.dim() else x


def _length_doubled(x: Tensor) -> Tensor:
    """Sequences are twice as long; images keep their size."""
    return torch.cat([x, x], 1) if x.dim() in (2, 3) else x


def _runs(gm: fx.GraphModule, args: Any, kwargs: Any) -> bool:
    try:
        with undisturbed(gm):
            gm(*args, **kwargs)
    except Exception:  # whatever the user's code raises
        return False
    return True


def _learns(qmodel: Any) -> bool:
    sections = (qmodel.cfg.w, qmodel.cfg.a)
    return any(section.quantizer.type not in FOR_CALIBRATION for section in sections)


def _stays(qmodel: Any, parts: str, why: str) -> Any:
    qmodel.model.meta[CHOICE] = f"traced by torch.fx, which cannot trace {parts}; {why}"
    log.info("%s", qmodel.model.meta[CHOICE])
    return qmodel


def _counted(qmodel: Any) -> str:
    if BACKENDS[str(qmodel.cfg.backend)].INTEGER_OPS:
        return "integer_macs"
    return "quantized_macs"


def _word(counted: str) -> str:
    return counted.removesuffix("_macs")


def _share(totals: Mapping[str, int], counted: str) -> float:
    return totals[counted] / max(totals["macs"], 1)
