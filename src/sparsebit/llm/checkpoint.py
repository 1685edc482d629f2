"""llm.load: a checkpoint that `llm.quantize`, llmcompressor or GPTQModel wrote, as a model that runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.llm.experts import unfold
from sparsebit.llm.formats import Format, format_of
from sparsebit.llm.sources import read_tensors, tensor_files, tie_weights, weightless
from sparsebit.numeric.spec import QuantSpec


def load(folder: str | Path, model: nn.Module | None = None, dtype: torch.dtype | None = None) -> Any:
    """The model in `folder` with a QuantLinear for every packed layer, in eval mode.

    model   for models that are not transformers': one of the right architecture; it is copied, not changed.
    dtype   of everything that is not packed; None: as stored.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder}: has no config.json; the run that writes it has not ended, call it again"
        )
    config = json.loads(path.read_text())
    settings = config.get("quantization_config")
    dense = config.get("sparsebit", {}).get("format") == "dense"
    if not settings and not dense:
        raise ConfigError(f"{path}: has no quantization_config; this checkpoint is not quantized")
    model = copy.deepcopy(model) if model is not None else skeleton(folder)
    files = tensor_files(folder)
    if dense:
        names = set(files)
        fill(model, names, read_tensors(files, sorted(names)), dtype)
        return model.eval()
    layout = format_of(settings)
    leaf = layout.suffixes[0]
    layers = [name.removesuffix("." + leaf) for name in files if name.endswith("." + leaf)]
    if config.get("sparsebit", {}).get("unfolded"):
        unfold(model.get_submodule(config["sparsebit"]["blocks"]))
    for name, spec in layout.specs(settings, layers).items():
        _swap(model, name, files, layout, spec, dtype)
    packed = {f"{layer}.{suffix}" for layer in layers for suffix in (*layout.suffixes, "bias")}
    names = set(files) - packed
    fill(model, names, read_tensors(files, sorted(names)), dtype)
    return model.eval()


def _swap(
    model: nn.Module,
    name: str,
    files: dict[str, Path],
    layout: Format,
    spec: QuantSpec,
    dtype: torch.dtype | None,
) -> None:
    owner, leaf, old = find_layer(model, name)
    keys = [f"{name}.{s}" for s in (*layout.suffixes, "bias") if f"{name}.{s}" in files]
    tensors = {key.rpartition(".")[2]: tensor for key, tensor in read_tensors(files, keys)}
    bias = tensors.pop("bias", None)
    kind = dtype or (bias.dtype if bias is not None else old.weight.dtype)
    setattr(owner, leaf, layout.layer(layout.decode(tensors, spec), bias, kind))


def find_layer(model: nn.Module, name: str) -> tuple[nn.Module, str, Any]:
    """The module that owns a layer, the layer's name in it, and the layer."""
    parent, _, leaf = name.rpartition(".")
    try:
        owner = model.get_submodule(parent)
        return owner, leaf, getattr(owner, leaf)
    except AttributeError:
        raise ConfigError(
            f"model: has no layer {name!r}, which the checkpoint holds; pass the right model"
        ) from None


def fill(
    model: nn.Module, names: set[str], tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None
) -> None:
    """Everything that is not packed; parameters without memory get the stored tensor itself."""
    _untie(model, names)
    state = model.state_dict(keep_vars=True)
    unknown = sorted(names - set(state))
    if unknown:
        raise ConfigError(f"model: has no {unknown[0]!r}, which the checkpoint holds; pass the right model")
    for name, tensor in tensors:
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        _assign(model, name, tensor, state[name])
    tie_weights(model)
    empty = [name for name, p in model.named_parameters() if p.is_meta]
    if empty:
        raise ConfigError(
            f"{len(empty)} tensors of the model are not in the checkpoint, the first is {empty[0]!r}"
        )


def _untie(model: nn.Module, names: set[str]) -> None:
    """Weights that are one in the model, but two in the files (rotated ones), become two."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen and name in names:
            leaf = name.rpartition(".")[2]
            model.get_submodule(name.rpartition(".")[0])._parameters[leaf] = nn.Parameter(
                parameter.detach().clone(), parameter.requires_grad
            )
        elif name in names:
            seen.add(id(parameter))


def _assign(model: nn.Module, name: str, tensor: Tensor, old: Tensor) -> None:
    if old.shape != tensor.shape:
        raise ConfigError(
            f"model: {name} is {tuple(old.shape)}, in the checkpoint {tuple(tensor.shape)}; pass the right model"
        )
    if not old.is_meta:
        old.data = tensor.to(old.device)  # the parameter stays, so tied weights stay tied
        return
    owner = model.get_submodule(name.rpartition(".")[0])
    leaf = name.rpartition(".")[2]
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def skeleton(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The model of transformers that config.json describes, without weights."""
    if not json.loads((folder / "config.json").read_text()).get("model_type"):
        raise ConfigError(
            "model: this checkpoint is not of a transformers model; pass one with load(folder, model)"
        )
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(folder)
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    if dtype is not None:
        settings.dtype = dtype
    with weightless():
        model: nn.Module = AutoModelForCausalLM.from_config(settings)
    return model
