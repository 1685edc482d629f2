"""Legacy: state dicts that the original wrote. `read_original` gives their entries the names and values of ours.

| there | here |
|---|---|
| `conv1_bn.*`: a layer with its folded BatchNorm | `conv1.*` |
| `bn1.module.*` | `bn1.*` |
| `fc_1.*`: the second call of `fc` | `fc.*` |
| a scale of shape (C, 1, 1, 1) | (C,); the quantizer itself reads both |
| `weight_quantizer.v` of AdaRound | `weight_quantizer.shift` |
| a quantizer that is not here, such as that of the input of a BatchNorm | left out, with a warning |
| a quantizer that was not there, or had no data | switched off, with a warning: the original computed in float |
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.numeric import broadcast
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.quantizers import Quantizer
from sparsebit.quantization.quantizers.adaround import AdaRoundQuantizer
from sparsebit.quantization.quantizers.base import UNUSED
from sparsebit.quantization.quantizers.lsq import LSQQuantizer
from sparsebit.quantization.quantizers.pact import PACTQuantizer

log = logging.getLogger("sparsebit")

State = dict[str, Tensor]
ENTRY = re.compile(
    r"(?P<owner>.+)\.(?P<kind>input|weight)_quantizer\.(?P<entry>scale|zero_point|alpha|v|observer\.(min|max)_val)"
)
IDENTITY = re.compile(r"(?P<op>.+)_identity\d+")  # in front of an op with several inputs
NO_DATA = {  # a quantizer of the original that no batch was shown to
    "scale": 1.0,
    "zero_point": 0.0,
    "observer.min_val": float("-inf"),
    "observer.max_val": float("inf"),
}
FOLDED = "_bn"  # parts of the original's names
HELD = "module."
FOLDED_THERE = (
    "the state dict holds folded batch norms, this model does not: build it with SCHEDULE.FUSE_BN: True"
)
FOLDED_HERE = (
    "this model has folded its batch norms, the state dict has not: build it with SCHEDULE.FUSE_BN: False"
)


def read_original(
    gm: fx.GraphModule, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *reports: Any
) -> None:
    """Called by QuantModel before it loads `state_dict`, with the arguments of `_load_from_state_dict`.

    A state dict that is not the original's stays the same.
    """
    given: State = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
    if not is_original(gm, given):
        return
    for key in given:
        del state_dict[prefix + key]
    state, folded = rename(gm, given)
    if strict and (problem := fold_mismatch(gm, state, folded)):
        reports[-1].append(problem)  # the list of error messages
    not_here = drop_quantizers(gm, state)
    add_missing(gm, state)
    not_there = []
    calibrated = {name for name, _ in quantizers_of(gm) if is_calibrated(name, state)}
    for name, quantizer in quantizers_of(gm):
        translate(name, quantizer, state)
        if name in calibrated:
            not_here += [name] if quantizer.absorbed else []
        elif not quantizer.absorbed:
            state[f"{name}.scale"] = torch.full((1,), UNUSED if calibrated else 0.0)
            not_there.append(name)
    state_dict.update({prefix + key: value for key, value in state.items()})
    report("of its quantizers are not used here", not_here)
    if calibrated:
        report("quantizers of this model had no scale there", not_there)


def is_original(gm: fx.GraphModule, given: State) -> bool:
    """Has the state dict a mark of the original: the shapes of its scales, its names, or its quantizers of norms?"""
    for key, value in given.items():
        found = ENTRY.fullmatch(key)
        if found is None:
            if key.partition(".")[2].startswith(HELD) and home_of(gm, key, given) != key:
                return True
            continue
        owner = gm._modules.get(found["owner"])
        without_input = isinstance(owner, QuantOpr) and not type(owner).quantize_input
        if (found["entry"] == "scale" and value.dim() > 1) or (found["kind"] == "input" and without_input):
            return True
    return False


# -- names -------------------------------------------------------------------------------------------
def rename(gm: fx.GraphModule, given: State) -> tuple[State, set[str]]:
    """The entries under our names, and the layers whose folded form was there.

    Of several entries with one name here, a folded layer counts most, then the layer of that name, then another call
    of it. What the original left behind of a norm that it folded is dropped.
    """
    folded = {owner_of(key).removesuffix(FOLDED) for key in given if is_folded(gm, owner_of(key))}
    norms = {owner_of(key) for key in given if key.endswith(f".{HELD}running_mean")} - set(gm._modules)
    claims: dict[str, list[tuple[bool, bool, str]]] = defaultdict(list)  # the least one counts
    for key in given:
        owner = owner_of(key)
        if folded and owner in norms:
            continue
        claim = (not is_folded(gm, owner), owner not in gm._modules, key)
        claims[home_of(gm, key, given)].append(claim)
    return {home: given[min(found)[-1]] for home, found in claims.items()}, folded


def owner_of(key: str) -> str:
    return key.partition(".")[0]


def is_folded(gm: fx.GraphModule, owner: str) -> bool:
    """Is this the original's name of a layer that is here under its own name?"""
    layer = owner.removesuffix(FOLDED)
    return owner not in gm._modules and layer != owner and layer in gm._modules


def home_of(gm: fx.GraphModule, key: str, given: State) -> str:
    """Our name of an entry; `key` itself where there is none."""
    owner, _, rest = key.partition(".")
    if is_folded(gm, owner):
        owner = owner.removesuffix(FOLDED)
    elif owner not in gm._modules:  # another call of a layer, or a layer that is kept under its path
        calls = (n for n in gm.graph.nodes if n.op == "call_module" and n.name == owner)
        owner = next((str(n.target) for n in calls), owner)
    module = gm._modules.get(owner)
    held, _, inner = rest.partition(".")  # an op of the original may hold the layer, here the op is the layer
    if module is not None and inner and held not in module._modules and f"{owner}.{inner}" not in given:
        known = {*module._parameters, *module._buffers}
        rest = inner if inner in known else rest
    return f"{owner}.{rest}" if rest else owner


def fold_mismatch(gm: fx.GraphModule, state: State, folded: set[str]) -> str:
    """Why a state dict with folded norms does not fit a model without, or the other way round; "" if it does."""
    for node in gm.graph.nodes:
        if node.op == "call_module" and str(node.target) in folded:
            readers = (gm._modules.get(str(user.target)) for user in node.users)
            if any(isinstance(reader, nn.modules.batchnorm._BatchNorm) for reader in readers):
                return FOLDED_THERE
    norms = {owner_of(key) for key in state if key.endswith(".running_mean")}
    return FOLDED_HERE if norms - set(gm._modules) else ""


# -- quantizers --------------------------------------------------------------------------------------
def quantizers_of(gm: fx.GraphModule) -> list[tuple[str, Quantizer]]:
    return [(name, m) for name, m in gm.named_modules() if isinstance(m, Quantizer)]


def drop_quantizers(gm: fx.GraphModule, state: State) -> list[str]:
    """Remove the entries of quantizers that ops here do not have; returns their names."""
    dropped: dict[str, None] = {}
    known = {node.name for node in gm.graph.nodes}
    for key in list(state):
        found = ENTRY.fullmatch(key)
        if found is None:
            continue
        owner = gm._modules.get(found["owner"])
        name = f"{found['kind']}_quantizer"
        before_an_op = IDENTITY.fullmatch(found["owner"])
        if owner is not None:
            unknown = getattr(owner, name, None) is None
        else:
            unknown = before_an_op is not None and before_an_op["op"] in known
        if unknown:
            del state[key]
            dropped[f"{found['owner']}.{name}"] = None
    return list(dropped)


def add_missing(gm: fx.GraphModule, state: State) -> None:
    """Add the entries that the original's modules did not have. A quantizer that it did not have counts as one without
    data."""
    for name, quantizer in quantizers_of(gm):
        for entry, value in NO_DATA.items():
            state.setdefault(f"{name}.{entry}", torch.tensor([value]))
        if is_calibrated(name, state):
            mine = {}
        else:
            mine = quantizer.state_dict()
        for entry, value in mine.items():
            state.setdefault(f"{name}.{entry}", value)
    for name, module in gm.named_modules():
        if isinstance(module, QuantOpr) and module.bias_correction is not None:
            state.setdefault(f"{name}.bias_correction", torch.zeros_like(module.bias_correction))


def is_calibrated(name: str, state: State) -> bool:
    """Did the quantizer have a scale? Without data it had 1 in the original, and an endless range."""
    scale = state[f"{name}.scale"]
    zero_point = state[f"{name}.zero_point"]
    if scale.dim() > 1 or bool(torch.isfinite(state[f"{name}.observer.min_val"]).all()):
        return True
    return not bool((scale == 1).all() and (zero_point == 0).all())


def translate(name: str, quantizer: Quantizer, state: State) -> None:
    """Convert the entries that a kind of quantizer stores in another form than the original."""
    layer = name.rpartition(".")[0]
    weight = None
    if name.endswith("weight_quantizer"):
        weight = state.get(f"{layer}.weight")
    if isinstance(quantizer, PACTQuantizer) and f"{name}.alpha" in state:
        state[f"{name}.alpha"] = state[f"{name}.alpha"].reshape(-1)
    if isinstance(quantizer, AdaRoundQuantizer) and weight is not None and f"{name}.v" in state:
        rounding = state.pop(f"{name}.v")
        grid = (state[f"{name}.{entry}"].float().reshape(-1) for entry in ("scale", "zero_point"))
        state[f"{name}.shift"] = shift_of(weight, rounding, quantizer, *grid)
    learned = isinstance(quantizer, LSQQuantizer) and not quantizer.is_symmetric and not quantizer.absorbed
    if learned and is_calibrated(name, state) and not bool(state[f"{name}.zero_point"].any()):
        read_sign(quantizer, weight)


def shift_of(
    weight: Tensor, rounding: Tensor, quantizer: Quantizer, scale: Tensor, zero_point: Tensor
) -> Tensor:
    """AdaRound's choice, up where `rounding` is not negative, as steps away from the nearest code."""
    axis = quantizer.ch_axis if scale.numel() > 1 else None
    step, zero = (broadcast(p.to(weight.device), weight.dim(), axis) for p in (scale, zero_point.round()))
    low = quantizer.spec.qmin - zero
    high = quantizer.spec.qmax - zero
    steps = weight.detach().float() / step
    chosen = (steps.floor() + (rounding.to(steps) >= 0)).clamp(low, high)
    return (chosen - steps.round().clamp(low, high)).to(torch.int8)


def read_sign(quantizer: Quantizer, weight: Tensor | None) -> None:
    """The original's lsq changed an affine scheme to a symmetric one where it saw a negative value.

    Its state dict does not tell. The weight does, and so does a calibration before the loading.
    """
    if weight is None:
        seen = quantizer.observer.min_val
    else:
        seen = weight.min()
    if not bool(torch.isfinite(seen).all()):
        log.warning(
            "%s: the state dict does not tell whether the original used signed codes here; calibrate before you load "
            "it, or call quantizer.qdesc.set_symmetric(True) where values are negative",
            quantizer.name,
        )
    elif bool((seen < 0).any()):
        quantizer.qdesc.set_symmetric(True)


def report(what: str, names: list[str]) -> None:
    if names:
        log.warning(
            "state dict of the original: %d %s; the values stay float: %s", len(names), what, ", ".join(names)
        )
