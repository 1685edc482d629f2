"""Legacy: state dicts of the original Sparsebit, with the keys that a SparseModel has here.

The original named layers like torch.fx (`model.layer1_0.weight`) and put some into a wrapper
(`model.bn.module.bias`). It had masks of convolutions and linear layers only. A batch norm takes the mask of
the convolution in front of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sparsebit.sparse.trace.names import Finder, inside_of_whole

PREFIX = "model."
MASKED_THEN = (nn.Conv2d, nn.Linear)


def as_written_here(smodel: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state dict with the keys of `smodel`. Unknown keys stay, and torch reports them."""
    own = smodel.state_dict()
    if not isinstance(state, Mapping) or own.keys() == state.keys():
        return state
    finder = Finder(key.removeprefix(PREFIX) for key in own)
    new: OrderedDict[str, Any] = OrderedDict()
    for key, value in state.items():
        if key in own:
            found = None
        else:
            found = finder.find(key.removeprefix(PREFIX))
        here = key if found is None else PREFIX + found
        if here not in own and here.endswith(".b_mask") and _has_no_bias(here, finder):
            continue
        new.setdefault(here, value)
    if any(key.endswith(".w_mask") for key in new):
        new.update({key: mask for key, mask in _masks_of_others(smodel, new).items() if key not in new})
    new._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
    return new


def _has_no_bias(key: str, finder: Finder) -> bool:
    layer = key.removeprefix(PREFIX).removesuffix("b_mask")
    return finder.find(f"{layer}w_mask") is not None and finder.find(f"{layer}bias") is None


def _masks_of_others(smodel: Any, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Masks, by key, of the layers that the original did not mask, or whose masks it did not store."""
    places = {inside_of_whole(path): f"{PREFIX}{path}." for path, _ in smodel.model.named_modules()}
    before = _layers_before_norms(smodel)
    found: dict[str, Tensor] = {}
    for path, opr in smodel.oprs().items():
        if isinstance(opr, MASKED_THEN):
            continue
        front = state.get(f"{places.get(before.get(path, ''), '')}w_mask")
        for name, mask in opr.named_buffers(recurse=False):
            if mask.dtype != torch.bool:
                continue
            found[places[path] + name] = torch.ones_like(mask)
            if isinstance(front, Tensor) and len(front) == len(mask):
                found[places[path] + name] = front.bool().flatten(1).any(1)
    return found


def _layers_before_norms(smodel: Any) -> dict[str, str]:
    """Pairs of paths: a batch norm, and the layer whose output it reads."""
    oprs = smodel.oprs()
    found = {}
    for node in smodel.calls().graph.nodes:
        path = ""
        if node.op == "call_module":
            path = str(node.target)
        if isinstance(oprs.get(path), _NormBase) and node.all_input_nodes:
            source = node.all_input_nodes[0]
            if source.op == "call_module" and str(source.target) in oprs:
                found[path] = str(source.target)
    return found
