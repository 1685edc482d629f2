"""A model that was built without an example: its first batch shows which of the optional inputs are used.

Until then the graph has the defaults of the optional inputs, or (all inputs are optional) takes all of them as given,
or holds the whole model as one node. If the first batch does not fit, the model is traced again with that batch. The
parameters stay the same objects, and settings of quantizers that the user has changed stay changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import fx, nn

from sparsebit.graph.ops import module_of
from sparsebit.graph.trace.guards import differs
from sparsebit.quantization.layers import below_root, names_of
from sparsebit.quantization.quantizers import Quantizer


class Waiting(NamedTuple):
    """All that is needed to trace a model again, and the state in which it was built."""

    source: nn.Module
    options: Mapping[str, Any]  # keyword arguments of QuantModel
    settings: Mapping[str, tuple[int, bool]]  # of the quantizers, by name
    versions: Mapping[str, int]  # of the parameters, by name


def waiting_for_batch(source: Any, gm: fx.GraphModule, options: Mapping[str, Any]) -> Waiting | None:
    """The facts that the first batch needs for its decision; None if there is no decision."""
    signature = gm.meta.get("signature")
    if signature is None or options["example"] is not None or options["trace"] == "export":
        return None
    if all(
        p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        for p in signature.parameters.values()
    ):
        return None
    return Waiting(source, options, _settings(gm), _versions(gm))


def was_changed(gm: fx.GraphModule, waiting: Waiting) -> bool:
    """Were weights written since the model was built? A checkpoint belongs to the graph that it was loaded into."""
    return _versions(gm) != waiting.versions


def fits(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Was the graph made for a call like this one?"""
    signature: inspect.Signature = gm.meta["signature"]
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return True  # no graph fits; the error of the forward is the clearest
    if "" in gm.meta["islands"]:
        return False  # the model is one node: with a batch it can perhaps be traced
    fixed = gm.meta["fixed"]
    if any(name in given and differs(given[name], value) for name, value in fixed.items()):
        return False
    read = {str(n.target) for n in gm.graph.nodes if n.op == "placeholder" and n.users}
    may_be_none = [p.name for p in signature.parameters.values() if p.default is None and p.name not in fixed]
    return all(given.get(name) is not None for name in may_be_none if name in read)


def take_over(old: fx.GraphModule, new: fx.GraphModule, waiting: Waiting) -> None:
    """Parameters and changed settings of `old` move into `new`."""
    known = {key: parameter for key, _, parameter in _parameters(old)}
    for key, owner, parameter in _parameters(new):
        kept = known.get(key)
        if kept is not None and kept.shape == parameter.shape:
            kept.data = parameter.data.to(kept)
            owner._parameters[key.name] = kept
    quantizers = _quantizers(new)
    for name, setting in _settings(old).items():
        if name in quantizers and setting != waiting.settings.get(name):
            bit, absorbed = setting
            quantizers[name].set_bit(bit)
            if absorbed:
                quantizers[name].set_fake_fused()


def _quantizers(gm: fx.GraphModule) -> dict[str, Quantizer]:
    return {m.name: m for m in gm.modules() if isinstance(m, Quantizer)}


def _settings(gm: fx.GraphModule) -> dict[str, tuple[int, bool]]:
    return {name: (q.bit, q.absorbed) for name, q in _quantizers(gm).items()}


def _versions(gm: fx.GraphModule) -> dict[str, int]:
    return {name: p._version for name, p in gm.named_parameters()}


class _Key(NamedTuple):
    """A parameter; the names of layers are the same in every graph of a model."""

    layer: str
    name: str


def _parameters(gm: fx.GraphModule) -> Iterator[tuple[_Key, nn.Module, nn.Parameter]]:
    for node in gm.graph.nodes:
        if node.op != "call_module":
            continue
        for inside, module in module_of(node, gm).named_modules():
            layer, _ = names_of(node, below_root(inside))
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield _Key(layer, name), module, parameter
