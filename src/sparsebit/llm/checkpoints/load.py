"""llm.load: a checkpoint that `llm.quantize`, llmcompressor or GPTQModel wrote, as a model that runs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.llm.checkpoints.saving import Origin, Saver
from sparsebit.llm.formats import Format, format_of
from sparsebit.llm.models.experts import turn, unfold
from sparsebit.llm.models.names import Names, Plan
from sparsebit.llm.models.skeleton import read_json, skeleton, tie_weights
from sparsebit.llm.models.sources import read_tensors, tensor_files
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
    config = read_json(path)
    settings: Any = config.get("quantization_config")
    dense = config.get("sparsebit", {}).get("format") == "dense"
    if not settings and not dense:
        raise ConfigError(f"{path}: has no quantization_config; this checkpoint is not quantized")
    if model is not None:
        model = copy.deepcopy(model)
    else:
        model = skeleton(folder)
    files = tensor_files(folder)
    names = Names(model)
    extra = set(config.get("sparsebit", {}).get("extra", []))
    layers: list[str] = []
    if not dense:
        layout = format_of(settings)
        leaf = layout.suffixes[0]
        layers = [name.removesuffix("." + leaf) for name in files if name.endswith("." + leaf)]
        _unfold(model, names, layers)
        for key, spec in _specs(layout, settings, layers, names).items():
            _swap(model, (names.layer(key), key), files, layout, spec, dtype)
    packed = {f"{key}.{suffix}" for key in layers for suffix in (*layout.suffixes, "bias")}
    plan = _fill_floats(model, names, {k: v for k, v in files.items() if k not in packed | extra}, dtype)
    if settings and hasattr(model, "save_pretrained"):
        called = {names.layer(key): key for key in layers}
        origin = Origin(folder.resolve(), config, {**plan.renamed(), **_weights(called)}, called)
        model.save_pretrained = Saver(model, origin)  # type: ignore[assignment]
    return model.eval()


def _weights(layers: dict[str, str]) -> dict[str, str]:
    return {f"{layer}.weight": f"{key}.weight" for layer, key in layers.items()}


def _specs(layout: Format, settings: dict[str, Any], keys: list[str], names: Names) -> dict[str, QuantSpec]:
    """The grid of every packed layer of the files. `settings` may use the names of the model or those of the files."""
    called = {key: names.layer(key) for key in keys}
    known = layout.specs(settings, [*dict.fromkeys([*called.values()])])
    return {key: known[name] for key, name in called.items()}


def _unfold(model: nn.Module, names: Names, keys: list[str]) -> None:
    """Conv1D and stacked experts become layers where the files have them packed."""
    owners = {names.layer(key).rpartition(".")[0] for key in keys}
    for stack, parts in names.parts.items():
        owner = stack.rpartition(".")[0]
        if f"{owner}.{parts[0].layer}".rpartition(".")[0] in owners:
            unfold(
                model.get_submodule(owner),
                lambda name, shape, owner=owner: names.parts[f"{owner}.{name}"],  # type: ignore[misc]
            )
    for path in owners:
        with contextlib.suppress(AttributeError):  # the search for the layer gives the clearer message
            turn(model.get_submodule(path))


def _fill_floats(model: nn.Module, names: Names, files: dict[str, Path], dtype: torch.dtype | None) -> Plan:
    """Everything that is not packed, through transformers' names."""
    plan = names.plan(files, lambda key: dict(read_tensors(files, [key]))[key].shape)
    if plan.extra:
        raise ConfigError(
            f"model: has no {plan.extra[0]!r}, which the checkpoint holds; pass the right model"
        )

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, entry in plan.entries.items():
            parts = dict(read_tensors(files, entry.keys))
            yield from names.convert(name, entry, [parts[key] for key in entry.keys]).items()

    fill(model, set(plan.made), tensors(), dtype)
    return plan


def _swap(
    model: nn.Module,
    which: tuple[str, str],
    files: dict[str, Path],
    layout: Format,
    spec: QuantSpec,
    dtype: torch.dtype | None,
) -> None:
    """A packed layer in the place of a float one: its name in the model, and in the files."""
    name, key = which
    owner, leaf, old = find_layer(model, name)
    keys = [f"{key}.{s}" for s in (*layout.suffixes, "bias") if f"{key}.{s}" in files]
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
    tie_weights(model, names | (set(model.state_dict()) - set(state)))
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
