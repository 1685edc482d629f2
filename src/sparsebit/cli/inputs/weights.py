"""--weights: safetensors, or torch.load that reads tensors only, so that no code in a file is run."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsebit.cli.terminal.output import InputError, one_line

WRAPPERS = ("state_dict", "model", "model_state_dict", "net")  # what training scripts put around the weights


def load_weights(model: Any, spec: str, path: Path) -> None:
    """Every weight of the model from the file: none missing, none left over."""
    from torch import nn

    if not isinstance(model, nn.Module):
        raise InputError(f"--weights: {spec} has its weights inside; leave --weights out")
    state = read_weights(path)
    names = set(model.state_dict())
    if not names & set(state):  # saved under DataParallel
        state = {name.removeprefix("module."): value for name, value in state.items()}
    counters = {name for name in names if name.endswith("num_batches_tracked")}
    missing = sorted(names - set(state) - counters)
    extra = sorted(set(state) - names)
    if missing or extra:
        said = [f"{len(n)} {w} ({n[0]})" for n, w in ((missing, "missing"), (extra, "unknown to it")) if n]
        raise InputError(f"{path}: does not fit {spec}: of {len(names)} weights {', '.join(said)}")
    own = model.state_dict()
    for name, value in state.items():
        if value.shape != own[name].shape:
            raise InputError(
                f"{path}: does not fit {spec}: {name} has the shape {tuple(value.shape)}, "
                f"the model wants {tuple(own[name].shape)}"
            )
    model.load_state_dict(state, strict=False)


def read_weights(path: Path) -> dict[str, Any]:
    """Name -> tensor."""
    from torch import Tensor

    if not path.is_file():
        what = "no such file"
        if path.is_dir():
            what = "is a folder; name the file of weights"
        raise InputError(f"{path}: {what}")
    if path.suffix == ".safetensors":
        found = _safetensors(path)
    else:
        found = _torch_file(path)
    for key in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found:
        raise InputError(
            f"{path}: holds a {type(found).__name__}, not weights by name; save model.state_dict()"
        )
    strange = next((name for name, value in found.items() if not isinstance(value, Tensor)), None)
    if strange is not None:
        raise InputError(f"{path}: {strange} is a {type(found[strange]).__name__}; save model.state_dict()")
    return dict(found)


def _safetensors(path: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise InputError(f"{path}: is broken or no safetensors file: {one_line(error)}") from None


def _torch_file(path: Path) -> Any:
    import torch

    with path.open("rb") as file:
        start = file.read(9)
    if start[8:] == b"{":  # safetensors under another name
        return _safetensors(path)
    if start and start[:1] not in (b"P", b"\x80"):  # a zip, or the first byte of a pickle
        raise InputError(f"{path}: is not a file of weights: neither safetensors nor written by torch.save")
    refuse_scripted_file(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported" in str(error) or "GLOBAL" in str(error):
            raise InputError(
                f"{path}: is a pickle that wants to run code, so it is refused; save model.state_dict(), or "
                f"better safetensors"
            ) from None
        raise InputError(f"{path}: is broken or no file of weights: {one_line(error)}") from None
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise InputError(f"{path}: is broken or no file of weights: {one_line(error)}") from None


def refuse_scripted_file(path: Path) -> None:
    """torch.jit.save writes a zip as torch.save does, with compiled code in it."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        is_scripted = any("/code/" in name for name in archive.namelist())
    if is_scripted:
        from sparsebit.graph.trace import SCRIPTED

        raise InputError(f"{path}: {SCRIPTED}")
