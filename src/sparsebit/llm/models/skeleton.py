"""A model of transformers without weights: of the class that its config.json names, whatever that is."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparsebit.errors import ConfigError


def skeleton(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The model that config.json describes. Its parameters take no memory; buffers that are not stored are real."""
    written = read_config(folder)
    if not written.get("model_type"):
        raise ConfigError(
            "model: this checkpoint is not of a transformers model; pass one with load(folder, model)"
        )
    check_transformers()
    check_model_type(folder, written)
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(folder)
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    if dtype is not None:
        settings.dtype = dtype
    kind = class_of(written.get("architectures") or [], settings, folder)
    with weightless():
        model: nn.Module = kind._from_config(settings)
    return model


def check_transformers() -> None:
    """One package that cannot be imported, such as torchvision, stops all of transformers, under another name."""
    import transformers

    try:
        transformers.PreTrainedModel  # noqa: B018 (it is imported when it is looked for)
    except ImportError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        what = f"{type(cause).__name__}: {first_line(cause)}"
        hint = "repair the package that this names"
        if "torchvision" in what:
            hint = (
                f"install the torchvision that belongs to torch {torch.__version__}, or uninstall it: "
                "models of text do not need it"
            )
        raise ConfigError(
            f"transformers {transformers.__version__} cannot be imported: {what}; {hint}"
        ) from error


def check_model_type(folder: Path, written: dict[str, Any]) -> None:
    """transformers has the code of the model: code that lies in the folder is not run."""
    import transformers

    kind = written.get("model_type")
    if not kind or kind in transformers.CONFIG_MAPPING:
        return
    way = "a newer version may"
    if "auto_map" in written:
        way = "the code in the folder is not run; load the model yourself, and pass it to sparsebit.llm.quantize"
    raise ConfigError(
        f"{folder}: transformers {transformers.__version__} knows no model type {kind!r}; {way}"
    )


def class_of(names: list[str], settings: Any, folder: Path) -> Any:
    """The class that `architectures` names; where nothing is named, the language model of this config."""
    import transformers

    usual: Any = transformers.AutoModelForCausalLM._model_mapping.get(type(settings), None)
    if not names:
        if usual is None:
            raise ConfigError(
                f"{folder}: config.json names no class under architectures, and {settings.model_type!r} is not a "
                "language model; write the class of the model there"
            )
        return usual
    found = getattr(transformers, names[0], None)
    if not isinstance(found, type):  # PhiMoEForCausalLM of the files is PhimoeForCausalLM there
        found = None
        if usual is not None and usual.__name__.lower() == names[0].lower():
            found = usual
    if found is None:
        raise ConfigError(
            f"{folder}: config.json names the class {names[0]!r}, which transformers {transformers.__version__} "
            "does not have; load a model that brings its own code yourself, and pass it as a module"
        )
    return found


def read_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """A file of a checkpoint that holds one JSON object."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {first_line(error)}; copy or download it again"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds no JSON object; copy or download it again")
    return found


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def make_up(model: Any, names: list[str]) -> list[str]:
    """Tensors that checkpoints leave out because the class computes them, such as tables of sines; returns their
    names."""
    patterns: list[str] = []
    for kind in ("_keys_to_ignore_on_save", "_keys_to_ignore_on_load_missing"):
        patterns.extend(getattr(model, kind, None) or ())
    found = []
    for name in names:
        if any(re.search(pattern, name) for pattern in patterns):
            found.append(name)
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in found):
        module = model.get_submodule(owner).to_empty(device="cpu")
        with torch.no_grad():
            model._init_weights(module)
    return found


def tie_weights(model: Any, there: set[str] | None = None) -> None:
    """transformers' own way to make tied weights one again; `there` holds the names that came from files.

    Two that should be one, but have different values in the files, stay two, and the config records it.
    """
    if not hasattr(model, "tie_weights"):
        return
    tied = getattr(model, "all_tied_weights_keys", None)
    if there is None or not isinstance(tied, dict):
        model.tie_weights()
        return
    two = [(a, b) for a, b in tied.items() if a in there and b in there and not _equal(model, a, b)]
    if not two:
        missing = set(model.state_dict()) - there
        model.tie_weights(missing_keys=missing, recompute_mapping=False)
        return
    for name in ("config", "text_config"):
        if name == "config":
            config = getattr(model, "config", None)
        else:
            config = model.config.get_text_config()
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False  # type: ignore[union-attr]


def _equal(model: nn.Module, a: str, b: str) -> bool:
    first = model.state_dict()[a]
    second = model.state_dict()[b]
    return first is second or (not first.is_meta and not second.is_meta and torch.equal(first, second))


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Modules built inside have parameters without memory; their buffers (such as rotary tables) are real."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            self._parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=False)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
