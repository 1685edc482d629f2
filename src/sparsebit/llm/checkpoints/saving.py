"""save_pretrained of a model that `llm.load` made: the same format, with the current codes and scales.

The method of transformers would write the buffers of packed layers, which no program reads.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.llm.checkpoints.card import copy_card
from sparsebit.llm.formats import Format, format_of, spec_of
from sparsebit.llm.layers.linear import QuantLinear
from sparsebit.llm.models.experts import fold_back, is_conv1d
from sparsebit.llm.models.names import Names
from sparsebit.llm.models.skeleton import weightless
from sparsebit.llm.models.sources import read_tensors, tensor_files, tied_names
from sparsebit.utils.files import write_whole

INDEX = "model.safetensors.index.json"
OWN = ("packed", "scales", "zeros", "g_idx")  # buffers of a packed layer; its bias is stored unchanged


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a model was loaded from."""

    folder: Path
    config: dict[str, Any]  # of config.json
    known: dict[str, str]  # tensor of the model -> its key in the files
    layers: dict[str, str]  # packed layer of the model -> its name in the files


class Saver:
    """Takes the place of a model's `save_pretrained`; copies and pickles of the model get their own."""

    def __init__(self, model: nn.Module, origin: Origin) -> None:
        self.model = model
        self.origin = origin

    def __call__(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "5GB",
        **others: Any,
    ) -> None:
        """Arguments are those of transformers; the others (token, variant, ...) must keep their usual values."""
        wrong = [name for name in ("variant", "repo_id") if others.get(name)] + ["push_to_hub"] * push_to_hub
        if wrong:
            raise ConfigError(
                f"save_pretrained: {wrong[0]} is not there for packed models; save to a folder and upload that"
            )
        if is_main_process:
            save_loaded(self.model, self.origin, Path(save_directory), state_dict, max_shard_size)


def save_loaded(
    model: Any, origin: Origin, folder: Path, state: dict[str, Tensor] | None, limit: int | str
) -> None:
    """A checkpoint like the one that the model was loaded from."""
    if folder.is_file():
        raise ConfigError(f"save_pretrained: {folder} is a file; name a folder")
    packed = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    with weightless():
        plain = type(model)._from_config(copy.deepcopy(model.config))
    names = Names(plain)
    names.known = dict(origin.known)
    names.layer_files.update(origin.layers)
    layout = format_of(origin.config["quantization_config"])
    tensors = _tensors(model, packed, layout, (plain, names), dict(state or model.state_dict()))
    tensors |= _extra(origin)
    config = _config(model, packed, layout, origin)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, tensors, limit)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    copy_card(origin.folder, folder)
    write_whole(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())


def _tensors(
    model: nn.Module,
    packed: dict[str, QuantLinear],
    layout: Format,
    plain: tuple[nn.Module, Names],
    state: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Under the names of the files."""
    whole, names = plain
    left_out = {f"{name}.{leaf}" for name in packed for leaf in OWN} | tied_names(model)
    floats = {name: tensor for name, tensor in state.items() if name not in left_out}
    as_they_are = [name for name, module in model.named_modules() if is_conv1d(module)]
    floats = fold_back(whole, floats, lambda name, shape: names.parts[name], {*packed, *as_they_are})
    for name, layer in packed.items():
        stored = layout.encode(layer.quantized())
        floats.update({f"{name}.{suffix}": tensor for suffix, tensor in stored.items()})
    return names.to_files(floats, packed)


def _extra(origin: Origin) -> dict[str, Tensor]:
    """Tensors that the model has no place for: only their files have them."""
    names = origin.config.get("sparsebit", {}).get("extra", [])
    if names and not origin.folder.is_dir():
        raise ConfigError(
            f"save_pretrained: {len(names)} tensors, such as {names[0]!r}, are only in {origin.folder}, which is gone"
        )
    if names:
        return dict(read_tensors(tensor_files(origin.folder), names))
    return {}


def _config(model: Any, packed: dict[str, QuantLinear], layout: Format, origin: Origin) -> dict[str, Any]:
    config: dict[str, Any] = {**origin.config, **json.loads(json.dumps(model.config.to_dict(), default=str))}
    config["architectures"] = [type(model).__name__]
    settings = origin.config["quantization_config"]
    if not packed:
        return {k: v for k, v in config.items() if k not in ("quantization_config", "sparsebit")}
    specs = {name: spec_of(m.bits, m.group, m.symmetric) for name, m in packed.items()}
    if set(packed) != set(origin.layers) or specs != layout.specs(settings, list(specs)):
        linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
        reordered = any(m.g_idx is not None for m in packed.values())
        new = layout.describe(specs, [name for name in linears if name not in packed], reordered)
        settings = {**({"dequantize": True} if settings.get("dequantize") else {}), **new}
    return {**config, "quantization_config": settings}


def _write(folder: Path, tensors: dict[str, Tensor], limit: int | str) -> None:
    """One file or several; files of an older checkpoint in the folder go."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save

    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
    for name, keys in split.filename_to_tensors.items():
        write_whole(folder / name, save({key: tensors[key] for key in keys}, {"format": "pt"}))
    for path in [*folder.glob("model*.safetensors"), folder / INDEX]:
        if path.name not in split.filename_to_tensors:
            path.unlink(missing_ok=True)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_whole(folder / INDEX, (json.dumps(index, indent=1) + "\n").encode())
