"""A model by its name on the command line: the user's code, a package's, a folder's or an exported program's."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsebit.cli.inputs.objects import call, find_object
from sparsebit.cli.inputs.weights import load_weights, refuse_scripted_file
from sparsebit.cli.terminal.output import InputError, did_you_mean, one_line, say

FORMS = "file.py:factory, package.module:factory, timm:name, torchvision:name, hf:DIR or a .pt2 file"
WEIGHT_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


def load_model(spec: str, weights: str | None = None) -> Any:
    """The model in eval mode and in float32, with finite parameters."""
    from torch import export

    kind, _, rest = spec.partition(":")
    if spec.endswith(".pt2"):
        model = _exported(Path(spec))
    elif kind in PACKAGES and not rest:
        raise InputError(f"{spec}: which model? write {FORMS}")
    elif kind in PACKAGES:
        model = PACKAGES[kind](spec, rest)
    elif spec.endswith(".onnx"):
        raise InputError(f"{spec}: an ONNX file cannot be quantized; name the PyTorch model: {FORMS}")
    elif spec.endswith(WEIGHT_FILES):
        refuse_scripted_file(Path(spec))
        raise InputError(
            f"{spec}: holds weights, not a model; write the model as {FORMS}, and --weights {spec}"
        )
    elif ":" not in spec and not spec.endswith(".py"):
        if (Path(spec) / "run.json").is_file():
            raise InputError(f"{spec}: is the folder of a run; name the model that it was made from")
        raise InputError(f"{spec}: is not a model; write {FORMS}")
    else:
        model = _of_factory(spec)
    if weights is not None:
        load_weights(model, spec, Path(weights))
    _refuse_non_finite(model, weights or spec)
    if isinstance(model, export.ExportedProgram):
        return model
    return _in_float32(spec, model.eval())


def _in_float32(spec: str, model: Any) -> Any:
    """Data comes in float32, and so do the kernels that run the file."""
    import torch

    halves = (torch.float16, torch.bfloat16)
    kind = next((p.dtype for p in model.parameters() if p.dtype in halves), None)
    if kind is None:
        return model
    say(f"{spec}: is {str(kind).removeprefix('torch.')}; it is taken as float32")
    return model.float()


def absolute(spec: str) -> str:
    """The name of the model with an absolute path."""
    kind, _, rest = spec.partition(":")
    if kind == "hf":
        return f"hf:{Path(rest).resolve()}"
    path, _, name = spec.rpartition(":")
    if path.endswith(".py"):
        return f"{Path(path).resolve()}:{name}"
    if spec.endswith(".pt2"):
        return str(Path(spec).resolve())
    return spec


def _of_factory(spec: str) -> Any:
    from torch import export, jit, nn

    from sparsebit.graph.trace import SCRIPTED

    found = find_object(spec)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise InputError(f"{spec}: is a {type(found).__name__}, not a function that gives a model")
        found = call(spec, found)
    if isinstance(found, (jit.ScriptModule, jit.ScriptFunction)):
        raise InputError(f"{spec}: {SCRIPTED}")
    if not isinstance(found, (nn.Module, export.ExportedProgram)):
        raise InputError(f"{spec}: gave a {type(found).__name__}; it must give an nn.Module")
    return found


def _exported(path: Path) -> Any:
    import torch

    if not path.is_file():
        raise InputError(f"{path}: no such file")
    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # torch.export.load would run pickled code
    try:
        return torch.export.load(str(path))
    except Exception as error:  # torch.export.load raises errors of many libraries
        raise InputError(
            f"{path}: is not an exported program that can be read safely: {one_line(error)}"
        ) from None
    finally:
        if before is None:
            del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
        else:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before


def optional(package: str, what: str) -> Any:
    """An optional package, or how to get it."""
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{what} needs the package {package}: pip install {PIP_NAMES.get(package, package)}")
    try:
        return importlib.import_module(package)
    except Exception as error:  # such as a torchvision that was built for another torch
        raise InputError(f"{what}: the package {package} cannot be imported: {one_line(error)}") from error


def _timm(spec: str, name: str) -> Any:
    timm = optional("timm", spec)
    if not timm.is_model(name):
        raise InputError(f"{spec}: timm has no such model{did_you_mean(name, timm.list_models())}")
    return timm.create_model(name, pretrained=False)


def _torchvision(spec: str, name: str) -> Any:
    models = optional("torchvision", spec).models
    known = models.list_models()
    if name not in known:
        raise InputError(f"{spec}: torchvision has no such model{did_you_mean(name, known)}")
    return models.get_model(name, weights=None)


def _hugging_face(spec: str, folder: str) -> Any:
    if not (Path(folder) / "config.json").is_file():
        raise InputError(f"{spec}: {folder} is not a folder with a config.json; download the model first")
    transformers = optional("transformers", spec)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()

    def build() -> Any:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        name = (config.architectures or ["AutoModel"])[0]
        cls = getattr(transformers, name, transformers.AutoModel)
        return cls.from_pretrained(folder, local_files_only=True, use_safetensors=True)

    return call(spec, build)


PIP_NAMES = {"PIL": "pillow"}
PACKAGES: dict[str, Callable[[str, str], Any]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "hf": _hugging_face,
}


def _refuse_non_finite(model: Any, source: str) -> None:
    import torch

    for name, p in model.named_parameters():
        if torch.nn.parameter.is_lazy(p):
            raise InputError(
                f"{source}: {name} has no shape yet; run the model once on a batch before you give it"
            )
        if p.is_floating_point() and not p.is_meta and not bool(torch.isfinite(p).all()):
            bad = int((~torch.isfinite(p)).sum())
            raise InputError(
                f"{source}: {name} has {bad} of {p.numel()} values that are NaN or infinite; take another checkpoint"
            )
