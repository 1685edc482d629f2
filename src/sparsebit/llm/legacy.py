"""The dicts that the original's convert.py saved: {"model", "hyper_parameters": {"groupsize"}, "layers_bit"}.

qweight int32 (words, outputs), for 3 bits whole triples of words ("pack32"), or the bytes of those words as rows of
int8 ("pack8"); scales and zeros * scales of shape (outputs, 1) or (outputs, groups, 1); a bias always.
Integers are clamped when they are made, so none flows into its neighbours (D19).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError, ExportError
from sparsebit.llm.linear import QuantLinear
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.words import pack_words, unpack_words, words_of


def to_legacy(model: nn.Module, pack8: bool = False) -> dict[str, Any]:
    """The dict for `torch.save`, of a model with QuantLinear layers."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    sizes = {m.group for m in layers.values()}
    if len(sizes) != 1:
        raise ExportError(
            f"the old format has one group size for all layers, this model has {sizes or 'none'}"
        )
    inside = {f"{name}.{key}" for name, m in layers.items() for key in m.state_dict()}
    state = {k: v for k, v in model.state_dict().items() if k not in inside}
    for name, layer in layers.items():
        state.update({f"{name}.{k}": v for k, v in encode(layer.quantized(), layer.bias, pack8).items()})
    return {
        "model": state,
        "hyper_parameters": {"groupsize": sizes.pop() or -1},
        "layers_bit": {name: layer.bits for name, layer in layers.items()},
    }


def from_legacy(checkpoint: dict[str, Any], model: nn.Module) -> nn.Module:
    """A copy of `model` (of the same architecture) that runs what the dict holds, in either packing."""
    model = copy.deepcopy(model)
    state = dict(checkpoint["model"])
    settings = checkpoint["hyper_parameters"]
    size = settings["groupsize"] if isinstance(settings, dict) else settings.groupsize
    for name, bits in checkpoint["layers_bit"].items():
        owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        old: nn.Linear = getattr(owner, leaf)
        parts = {k: state.pop(f"{name}.{k}") for k in ("qweight", "scales", "zeros", "bias")}
        q = decode(parts, bits, old.in_features, None if size == -1 else size)
        bias = None if old.bias is None and not bool(parts["bias"].any()) else parts["bias"]
        setattr(owner, leaf, QuantLinear(q, bias, old.weight.dtype))
    missing, unknown = model.load_state_dict(state, strict=False)
    lost = [k for k in missing if not isinstance(model.get_submodule(k.rpartition(".")[0]), QuantLinear)]
    if lost or unknown:
        raise ConfigError(
            f"checkpoint: does not fit this model at {(lost + unknown)[0]!r}; pass the right model"
        )
    return model.eval()


def encode(q: QuantizedWeight, bias: Tensor | None = None, pack8: bool = False) -> dict[str, Tensor]:
    if q.g_idx is not None or q.bits not in (2, 3, 4):
        raise ExportError(
            "the old format holds 2, 3 and 4 bits and no g_idx; use static_groups and those widths"
        )
    words = pack_words(q.codes.T, q.bits, axis=0)
    if q.bits == 3:  # its kernel reads three words at a time
        words = nn.functional.pad(words, (0, 0, 0, -len(words) % 3))
    scales = q.scales.float()
    zeros = q.zeros.float() * scales
    shape = (-1, 1) if q.group is None else (len(scales), -1, 1)
    return {
        "qweight": to_bytes(words) if pack8 else words,
        "scales": scales.reshape(shape),
        "zeros": zeros.reshape(shape),
        "bias": torch.zeros(q.shape[0]) if bias is None else bias,
    }


def decode(tensors: dict[str, Tensor], bits: int, inputs: int, group: int | None) -> QuantizedWeight:
    words, scales = tensors["qweight"], tensors["scales"].float()
    if words.dtype == torch.int8:
        words = to_words(words)
    if len(words) < words_of(inputs, bits):
        raise ConfigError(f"qweight: {len(words)} rows are too few for {inputs} inputs of {bits} bits")
    codes = unpack_words(words, bits, inputs, axis=0).T.contiguous()
    zeros = (tensors["zeros"].float() / scales).flatten(1)
    if bool(((zeros - zeros.round()).abs() > 0.05).any()) or bool((zeros.round() < 0).any()):
        raise ConfigError(
            "zeros: are no multiples of the scales; this checkpoint was not written by convert.py"
        )
    scales = scales.flatten(1)
    zeros = zeros.round().clamp(0, 2**bits - 1).to(torch.uint8)
    return QuantizedWeight(codes, scales, zeros, bits, symmetric=False, group=group)


def to_bytes(words: Tensor) -> Tensor:
    """pack32 -> pack8: each word becomes four rows, lowest byte first."""
    parts = [((words >> (8 * i)) & 0xFF) for i in range(4)]
    return torch.stack(parts, 1).flatten(0, 1).to(torch.uint8).view(torch.int8)


def to_words(rows: Tensor) -> Tensor:
    """pack8 -> pack32."""
    parts = rows.view(torch.uint8).long().unflatten(0, (-1, 4))
    words = sum(parts[:, i] << (8 * i) for i in range(4))
    return torch.where(words >= 2**31, words - 2**32, words).int()
