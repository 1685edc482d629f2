"""Where the model comes from: a module of transformers, a float folder, or a folder that llm.quantize wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sparsebit.errors import ExportError
from sparsebit.llm.models.skeleton import check_transformers
from sparsebit.llm.models.sources import opened, tensor_files


@dataclass(frozen=True)
class Source:
    """`model()` loads the weights, which takes long: everything else is known before."""

    config: Any
    name: str
    folder: Path | None
    model: Callable[[], nn.Module]
    end_ids: tuple[int, ...] = ()  # where generation stops

    def ends(self, keys: dict[str, Any]) -> dict[str, Any]:
        """A second token that ends an answer. llama.cpp finds the usual ones by their text, when there are more."""
        if "tokenizer.ggml.tokens" not in keys:
            return {}
        rows = len(keys["tokenizer.ggml.tokens"])
        eos = keys.get("tokenizer.ggml.eos_token_id")
        others = [i for i in self.end_ids if i != eos and i < rows]
        if len(others) == 1 and eos is not None:
            return {"tokenizer.ggml.eot_token_id": others[0]}
        return {}


def open_model(model: Any) -> Source:
    if isinstance(model, nn.Module):
        return _of_module(model)
    if not isinstance(model, (str, Path)):
        raise ExportError(f"model: expected a module or a folder, got {type(model).__name__}")
    folder = Path(model)
    path = folder / "config.json"
    if not path.is_file():
        raise ExportError(
            f"{folder}: is not a folder with a config.json; pass a model's folder or an nn.Module"
        )
    try:
        settings = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ExportError(f"{path}: is not JSON: {error}") from None
    check_transformers()
    from transformers import AutoConfig

    if not settings.get("model_type"):
        raise ExportError(f"{path}: names no model_type; only models of transformers can be written as GGUF")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    _check_class(config.architectures, str(folder))
    packed = bool(settings.get("quantization_config"))
    beside = folder / "generation_config.json"
    more = {}
    if beside.is_file():
        more = json.loads(beside.read_text("utf-8"))
    ends = _ids(more.get("eos_token_id")) or _ids(getattr(config, "eos_token_id", None))
    name = folder.resolve().name
    return Source(config, name, folder, lambda: _load(folder, packed), ends)


def _of_module(model: Any) -> Source:
    config = getattr(model, "config", None)
    if not getattr(config, "model_type", None):
        raise ExportError(
            f"model: {type(model).__name__} has no config of transformers; only its models can be written as GGUF"
        )
    _check_class([type(model).__name__], "model")
    generation = getattr(model, "generation_config", None)
    ends = _ids(getattr(generation, "eos_token_id", None)) or _ids(getattr(config, "eos_token_id", None))
    name = Path(getattr(config, "_name_or_path", "") or type(model).__name__).name
    return Source(config, name, None, lambda: model, ends)


def _check_class(names: Any, where: str) -> None:
    """A classifier or a bare encoder has the same model_type, but no head that gives tokens."""
    wrong = [name for name in names or [] if not name.endswith(("ForCausalLM", "LMHeadModel"))]
    if wrong:
        raise ExportError(
            f"{where}: {wrong[0]} is not a causal language model; llama.cpp needs one with a head"
        )


def _load(folder: Path, packed: bool) -> nn.Module:
    from sparsebit.llm.checkpoints.load import load

    if packed:
        found: nn.Module = load(folder)
        return found
    for path in sorted(set(tensor_files(folder).values())):
        with opened(path):  # a file that is corrupt is named
            pass
    from transformers import AutoModelForCausalLM

    read: Any = AutoModelForCausalLM.from_pretrained
    model, info = read(
        folder, local_files_only=True, use_safetensors=True, dtype="auto", output_loading_info=True
    )
    lost = sorted(info["missing_keys"])
    if lost:
        raise ExportError(
            f"{folder}: {len(lost)} tensors of the model are not in its files, such as {lost[0]!r}; "
            "they would be random numbers"
        )
    whole: nn.Module = model.eval()
    return whole


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return (int(value),)
