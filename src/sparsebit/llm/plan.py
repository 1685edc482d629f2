"""The plan of the output, made before the work: the layout, the group sizes, config.json, names and shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparsebit.llm.formats import FORMATS, Format, spec_of
from sparsebit.llm.groups import group_sizes, nearly_all
from sparsebit.llm.models.experts import is_conv1d
from sparsebit.llm.models.sources import InMemory
from sparsebit.llm.readers import Packed, Plan
from sparsebit.llm.walk.job import Job
from sparsebit.numeric.spec import QuantSpec


def is_transformers(model: nn.Module) -> bool:
    """A class that is not from transformers: only its author's code can build such a model from a folder."""
    return type(model).__module__.split(".")[0] == "transformers" and hasattr(model, "config")


def matrices(source: InMemory) -> dict[str, tuple[int, int, bool]]:
    """Outputs and inputs of every layer that is quantized, and whether it is an expert of a stack."""
    names = source.names
    found = {}
    for stack, parts in names.parts.items():
        owner = stack.rpartition(".")[0]
        for part in parts:
            found[f"{owner}.{part.layer}"] = (part.rows[1] - part.rows[0], names.state[stack].shape[2], True)
    for name in source.layout.names():
        if name not in found:
            layer: Any = source.model.get_submodule(name)
            outputs, inputs = layer.weight.shape[::-1] if is_conv1d(layer) else layer.weight.shape
            found[name] = (outputs, inputs, False)
    return {name: found[name] for name in source.layout.names()}


def left_float(source: InMemory, specs: Mapping[str, QuantSpec]) -> dict[str, int]:
    """Matrices in the blocks that stay float, and their numbers of weights; the largest first."""
    layers = {name: outputs * inputs for name, (outputs, inputs, _) in matrices(source).items()}
    found = {name: size for name, size in layers.items() if name not in specs}
    found |= {name: size for name, size in source.layout.kept if source.layout.inside(name)}
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def format_for(source: InMemory, name: str) -> Format:
    """The layout of that name; Conv1D layers of transformers, which keep their matrix turned, have a separate
    layout."""
    layers = []
    for n in source.layout.names():
        if n not in source.names.layer_files:
            layers.append(source.model.get_submodule(n))
    if name == "compressed-tensors" and is_transformers(source.model) and any(is_conv1d(m) for m in layers):
        return FORMATS["turned"]()
    return FORMATS[name]()


@dataclass(frozen=True)
class Grids:
    """The settings of the user."""

    bits: int
    group_size: int | None
    symmetric: bool
    candidates: tuple[int, ...] | None = None
    force: bool = False
    reader: str = "transformers"  # which must run it


def choices(source: InMemory, layout: Format, grids: Grids) -> Iterator[dict[str, QuantSpec]]:
    """Grids of the layers, the best first: a size per layer, then one size, which readers can unpack while loading.

    Layers that are left out stay float.
    """
    own = not is_transformers(source.model)
    about = matrices(source)
    if not (own or grids.force or layout.plain):  # no reader finds experts that have no names in checkpoints
        about = {name: a for name, a in about.items() if name not in source.names.unnamed}
    inputs = {name: width for name, (_, width, _) in about.items()}
    weights = {name: outputs * width for name, (outputs, width, _) in about.items()}
    sizes = group_sizes(
        inputs,
        grids.group_size,
        weights=None if layout.one_group_size else weights,
        one_for_all=layout.one_group_size,
        alike=[[name for name, (_, _, expert) in about.items() if expert]],
        force=grids.force or own,  # llm.load runs short groups
    )
    if grids.symmetric or own or layout.one_group_size or grids.group_size is not None:
        yield {name: spec_of(grids.bits, size, grids.symmetric) for name, size in sizes.items()}
    if grids.group_size is None and not own and not layout.one_group_size:
        sizes = nearly_all(inputs, weights)
        yield {name: spec_of(grids.bits, size, grids.symmetric) for name, size in sizes.items()}


def plan_of(source: InMemory, job: Job, specs: Mapping[str, QuantSpec]) -> Plan:
    """The checkpoint that is going to be written, with these grids."""
    layout = job.format
    scales = job.scale_dtype
    names = source.names
    about = matrices(source)
    state = dict(names.state)
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, spec in specs.items() if not layout.plain else ():
        state.pop(f"{name}.weight", None)
        for suffix, (shape, kind) in layout.shapes(spec, *about[name][:2]).items():
            tensors[f"{names.layer_file(name)}.{suffix}"] = (
                shape,
                _name(scales) if kind == "scale" else kind,
            )
    for stack, parts in names.parts.items() if not layout.plain else ():
        if f"{stack.rpartition('.')[0]}.{parts[0].layer}" in specs:
            del state[stack]
    floats = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in state.items()}
    tensors |= {name: (tuple(t.shape), _name(t.dtype)) for name, t in names.to_files(floats).items()}
    layers = {name: Packed(spec, *about[name]) for name, spec in specs.items()}
    return Plan(layout.TYPE, config_of(source, job, specs), layers, tensors, reordered=reorders(job))


def config_of(source: InMemory, job: Job, specs: Mapping[str, QuantSpec]) -> dict[str, Any]:
    """config.json."""
    model = source.model
    layout = source.layout
    ignored = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in specs]
    own: Any = getattr(model, "config", None)
    config: dict[str, Any] = own.to_dict() if hasattr(own, "to_dict") else {}
    about = job.format.describe(dict(specs), ignored, reorders(job))
    if about:
        config["quantization_config"] = about
    config["sparsebit"] = {
        "towers": [tower.path for tower in layout.towers],
        **({} if about else {"format": job.format.TYPE}),
    }
    if source.extra:
        config["sparsebit"]["extra"] = list(source.extra)
    if config.get("model_type"):
        config["architectures"] = [_class_name(model, config.get("architectures") or [])]
    found: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return found


def _class_name(model: nn.Module, named: list[str]) -> str:
    """The class name in the spelling of the source, if only the spelling differs."""
    own = type(model).__name__
    if named and named[0].lower() == own.lower():
        return named[0]
    return own


def reorders(job: Job) -> bool:
    """True if groups follow the order in which columns are solved, and are not runs of inputs."""
    options = {**job.method.options(), **job.options}
    in_order = bool(options.get("act_order", False))
    runs_of_inputs = bool(options.get("static_groups", True))
    grouped = any(spec.group for spec in job.specs.values())
    return in_order and not runs_of_inputs and grouped


def mixed(specs: Mapping[str, QuantSpec], widths: tuple[int, ...]) -> dict[str, QuantSpec]:
    """Widths that stand for those that will be chosen: neighbours differ."""
    return {name: spec.with_bits(widths[i % len(widths)]) for i, (name, spec) in enumerate(specs.items())}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
