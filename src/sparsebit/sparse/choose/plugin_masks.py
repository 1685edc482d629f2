"""Masks from plug-ins, as in the original: from a sparser by calc_mask(x), from a layer by
calc_mask(pre_mask).

Masks of single weights are used without a change. Where whole channels are pruned, a mask decides about the
channels that its layer makes. A channel is removed if every layer that makes it agrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from sparsebit.errors import ConfigError
from sparsebit.sparse.cut.masks import owner_of
from sparsebit.sparse.labels.labels import FIXED
from sparsebit.sparse.labels.walk import Walk

Oprs = dict[str, Any]  # module path -> SparseOpr


def mask_by_sparser(opr: Any, name: str, path: str, share: float) -> Tensor:
    """The mask that calc_mask(x) of the sparser returns for a parameter; `share` is the part of the ratio
    that is due."""
    sparser = opr.sparser
    weight = opr.get_parameter(name)
    if sparser.pattern:
        raise ConfigError(
            f"PATTERN: calc_mask of {type(sparser).__name__} decides without a pattern; leave out PATTERN"
        )
    with _due(sparser, share):
        mask = sparser.calc_mask(weight)
    where = f"{path}.{name}: calc_mask of {type(sparser).__name__}"
    if not isinstance(mask, Tensor):
        raise ConfigError(f"{where} must return a tensor, got {type(mask).__name__}")
    if mask.dim() == 1 and weight.dim() > 1 and len(mask) == len(weight):
        mask = mask.view(-1, *[1] * (weight.dim() - 1))  # one value per output channel
    mask = mask.detach()
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ConfigError(
            f"{where} must return zeros and ones; to scale a weight, multiply it in your forward"
        )
    try:
        return mask.bool().expand(weight.shape)
    except RuntimeError:
        shapes = f"{list(weight.shape)}, got {list(mask.shape)}"
        raise ConfigError(f"{where} must return a mask of the shape {shapes}") from None


@contextmanager
def _due(sparser: Any, share: float) -> Iterator[None]:
    """Inside, the ratio is the part of it that a schedule has reached."""
    ratio = sparser.ratio
    sparser.ratio = ratio * share
    try:
        yield
    finally:
        sparser.ratio = ratio


def ask_layers(gm: fx.GraphModule, oprs: Oprs, share: float, norms: bool = False) -> dict[str, Any]:
    """Call calc_mask(pre_mask) of the layers that define it, in the order of the graph; returns results by path.

    pre_mask is the result of the layer in front. The original passed the result of the previous call of any layer.
    norms   only norms are called: the other layers have their masks.
    """
    asked = {path for path, opr in oprs.items() if opr.masks_itself and (_is_norm(opr) or not norms)}
    decided: dict[str, Any] = {}
    passed: dict[fx.Node, Any] = {}  # which of its channels a node keeps, if known
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        before = None
        if len(inputs) == 1:
            before = passed.get(inputs[0])
        path = ""
        if node.op == "call_module":
            path = str(node.target)
        opr = oprs.get(path)
        if opr is None:
            passed[node] = before
            continue
        if path in asked and path not in decided:
            decided[path] = _ask(opr, before, share)
        if path in asked:
            passed[node] = decided[path]
        else:
            passed[node] = _made(opr, before)
    for path in sorted(asked - decided.keys()):  # inside a part that is not traced
        decided[path] = _ask(oprs[path], None, share)
    return decided


def _ask(opr: Any, before: Any, share: float) -> Any:
    with _due(opr.sparser, share):
        return opr.calc_mask(before)


def _is_norm(opr: Any) -> bool:
    return all(p.dim() < 2 for p in opr.layer_parameters().values())


def _made(opr: Any, before: Any) -> Any:
    """Which channels a layer keeps. A norm keeps those of its input; other layers follow their mask."""
    if _is_norm(opr):
        return before
    if opr.sparser.kind == "unstructured" or "weight" not in opr.layer_parameters():
        return None
    return opr.mask_of("weight").flatten(1).any(1)


def decisions(walk: Walk, oprs: Oprs, decided: dict[str, Any], share: float) -> tuple[Tensor, Tensor]:
    """The classes that masks decide about, and those of them that are removed."""
    n = len(walk.labels)
    judged = torch.zeros(n, dtype=torch.bool)
    saved = torch.zeros(n, dtype=torch.bool)
    for part in walk.slices.values():
        if not part.produces:
            continue
        opr, name = owner_of(part.path, oprs)
        path = part.path.removesuffix(f".{name}")
        if opr is None:
            kept = None
        else:
            kept = _decision(opr, path, name, part.axis, decided, share)
        roots = walk.labels.roots(part.labels)
        if kept is None:
            saved[roots] = True
            continue
        if kept.shape != roots.shape:
            raise ConfigError(
                f"{path}: calc_mask of {type(opr).__name__} returns {len(kept)} values, and there are "
                f"{len(roots)} channels; return one for each, or None"
            )
        judged[roots] = True
        saved[roots[kept]] = True
    saved[FIXED] = True
    removed = judged & ~saved
    for classes in walk.dimensions():
        if bool(removed[classes].all()):
            raise ConfigError(
                "calc_mask: masks every channel of a layer, so the layer would be empty; keep at least one"
            )
    return judged, removed


def _decision(
    opr: Any, path: str, name: str, axis: int, decided: dict[str, Any], share: float
) -> Tensor | None:
    """Which channels on `axis` a layer keeps; None if its mask does not decide."""
    if path in decided:
        kept = decided[path]
        if isinstance(kept, Tensor) and kept.dim() == 1:
            return kept.detach().bool().cpu()
        return _channels(opr.mask_of(name), axis, f"{path}.{name}: calc_mask of {type(opr).__name__}")
    if not opr.sparser.decides:
        return None
    where = f"{path}.{name}: calc_mask of {type(opr.sparser).__name__}"
    if not opr.sparser.ratio * share:
        return torch.ones(opr.get_parameter(name).shape[axis], dtype=torch.bool)
    return _channels(mask_by_sparser(opr, name, path, share), axis, where)


def _channels(mask: Tensor, axis: int, where: str) -> Tensor:
    rows = mask.detach().cpu().bool().movedim(axis, 0).flatten(1)
    kept = rows.any(1)
    if not torch.equal(kept, rows.all(1)):
        raise ConfigError(
            f"{where} masks single weights, and TYPE is structured: mask whole output channels, "
            f"or write TYPE: unstructured"
        )
    return kept
