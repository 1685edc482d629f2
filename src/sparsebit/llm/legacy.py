"""Legacy: the file of the original's convert.py, a dict {"model", "hyper_parameters": {"groupsize"}, "layers_bit"}.

qweight int32 (words, outputs), for 3 bits whole triples of words ("pack32"), or the bytes of those words as rows of
int8 ("pack8"); scales and zeros * scales of shape (outputs, 1) or (outputs, groups, 1); a bias always.
Integers are clamped when they are made, so none flows into its neighbours (D19).
"""

from __future__ import annotations

import argparse
import copy
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError, ExportError
from sparsebit.llm.checkpoints.load import fill, find_layer
from sparsebit.llm.layers.linear import QuantLinear
from sparsebit.llm.models.experts import unfold
from sparsebit.llm.models.names import Names
from sparsebit.llm.models.skeleton import skeleton, tie_weights
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.words import pack_words, unpack_words, words_of
from sparsebit.utils.files import whole_file

KEYS = ("model", "hyper_parameters", "layers_bit")
WIDTHS = (2, 3, 4)
DERIVED = ".rotary_emb.inv_freq"  # transformers 4.28 stored this table, which follows from the config


def load_legacy(path: str | Path, folder: str | Path, dtype: torch.dtype | None = None) -> Any:
    """The model of transformers in the file `path`; `folder` holds the config.json of its float model.

    dtype   of everything that is not packed; None: the dtype in the config.
    """
    return from_legacy(read_legacy(path), skeleton(Path(folder), dtype))


def read_legacy(path: str | Path) -> dict[str, Any]:
    """The dict in a file. Only tensors and plain values are read: no code of the file is run."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # some files hold the script's options
            found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}); name another file") from None
    except (EOFError, RuntimeError, pickle.UnpicklingError):
        raise ConfigError(f"{path}: is not a file of torch.save with plain values; write it again") from None
    lost = [key for key in KEYS if not isinstance(found, dict) or key not in found]
    if lost:
        raise ConfigError(
            f"{path}: is not a checkpoint of convert.py, it has no {lost[0]!r}; name another file"
        )
    checkpoint: dict[str, Any] = found
    return checkpoint


def write_legacy(checkpoint: dict[str, Any], path: str | Path) -> None:
    """The file is there as a whole, or not at all."""
    with whole_file(path) as file:
        torch.save(checkpoint, file)


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
    tie_weights(model)
    state = {key: tensor for key, tensor in checkpoint["model"].items() if not key.endswith(DERIVED)}
    settings = checkpoint["hyper_parameters"]
    if isinstance(settings, dict):
        size = settings["groupsize"]
    else:
        size = settings.groupsize
    if not all(_is_linear(model, name) for name in checkpoint["layers_bit"]):
        names = Names(model)
        unfold(model, lambda stack, shape: names.parts[stack])
    for name, bits in checkpoint["layers_bit"].items():
        _swap(model, name, state, bits, None if size == -1 else size)
    packed = {
        f"{name}.{key}"
        for name, m in model.named_modules()
        if isinstance(m, QuantLinear)
        for key in m.state_dict()
    }
    lost = [key for key in model.state_dict() if key not in packed and key not in state]
    if lost:
        raise ConfigError(f"checkpoint: has no {lost[0]!r}, which the model has; pass the right model")
    state = _untied(model, state)
    fill(model, set(state), state.items(), None)
    return model.eval()


def _swap(model: nn.Module, name: str, state: dict[str, Tensor], bits: int, group: int | None) -> None:
    """A QuantLinear in the place of a layer; its tensors are taken out of `state`."""
    owner, leaf, old = find_layer(model, name)
    keys = {k: f"{name}.{k}" for k in ("qweight", "scales", "zeros", "bias")}
    lost = [key for key in keys.values() if key not in state]
    if lost:
        raise ConfigError(f"checkpoint: has no {lost[0]!r}; it is damaged, write it again")
    parts = {k: state.pop(key) for k, key in keys.items()}
    outputs = parts["qweight"].shape[1]
    if outputs != old.out_features:
        raise ConfigError(
            f"checkpoint: {name} has {outputs} outputs, in the model {old.out_features}; pass the right model"
        )
    q = decode(parts, bits, old.in_features, group)
    if old.bias is None and not bool(parts["bias"].any()):
        bias = None
    else:
        bias = parts["bias"]
    setattr(owner, leaf, QuantLinear(q, bias, old.weight.dtype))


def _is_linear(model: nn.Module, name: str) -> bool:
    try:
        return isinstance(model.get_submodule(name), nn.Linear)
    except AttributeError:
        return False


def _untied(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the model's dtypes; weights that are one in the model under their first name only."""
    owned = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    found = {}
    for name, tensor in state.items():
        kind = owned[name].dtype if name in owned else tensor.dtype
        other = first.setdefault(id(owned.get(name, tensor)), name)
        if other == name:
            found[name] = tensor.to(kind)
        elif not torch.equal(state[other], tensor):
            raise ConfigError(
                f"checkpoint: {other!r} and {name!r} differ, and are one tensor in this model; "
                "set tie_word_embeddings to false in its config"
            )
    return found


def encode(q: QuantizedWeight, bias: Tensor | None = None, pack8: bool = False) -> dict[str, Tensor]:
    if q.g_idx is not None or q.bits not in WIDTHS:
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
    words = tensors["qweight"]
    scales = tensors["scales"].float()
    if words.dtype == torch.int8:
        words = to_words(words)
    needed = words_of(inputs, bits)
    padded = needed + (-needed % 3 if bits == 3 else 0)
    if len(words) not in (needed, padded):
        raise ConfigError(
            f"qweight: has {len(words)} rows, {inputs} inputs of {bits} bits take {padded}; pass the right model"
        )
    columns = -(-inputs // (group or inputs))
    if scales.flatten(1).shape[1] != columns:
        raise ConfigError(
            f"scales: has {scales.flatten(1).shape[1]} groups, {inputs} inputs in groups of {group or inputs} "
            f"are {columns}; pass the right model"
        )
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
