"""Adapters on packed models. PEFT takes a QuantLinear for the Linear layer it is:

    model = get_peft_model(llm.load("out"), LoraConfig(...))

Here is what PEFT cannot know: how adapters are merged into packed weights, and what that loses.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError, SparsebitError
from sparsebit.llm.checkpoints.card import CARD
from sparsebit.llm.checkpoints.saving import INDEX, Saver
from sparsebit.llm.formats import format_of, spec_of
from sparsebit.llm.layers.linear import QuantLinear
from sparsebit.llm.models.sources import tensor_files
from sparsebit.llm.training.nf4 import is_nf4, nf4_layer, nf4_weight
from sparsebit.numeric.quantized_weight import QuantizedWeight, round_to
from sparsebit.numeric.solvers.rtn import rtn


@dataclass(frozen=True)
class Merged:
    """A model without adapters, and for each layer that had one: the adapter's size and the error, both as shares.

    adapter  |delta| / |weight|
    error    |merged - (weight + delta)| / |delta|: 0 is exact, from 1 on nothing of the adapter is left
    """

    model: Any
    layers: dict[str, dict[str, float]]

    def __str__(self) -> str:
        rows = [f"  {n}: adapter {v['adapter']:.2%}, error {v['error']:.2%}" for n, v in self.layers.items()]
        return "\n".join([f"{len(rows)} layers merged, mean error {self.error:.2%} of the adapters", *rows])

    @property
    def error(self) -> float:
        return sum(v["error"] for v in self.layers.values()) / max(len(self.layers), 1)


@torch.no_grad()
def merge(model: Any, into: str = "float") -> Merged:
    """Adapters become part of the weights; like PEFT's merge_and_unload this uses up `model`.

    into="float"  all packed layers become float Linear layers: an ordinary model, for `save_pretrained`; exact.
    into="grid"   they stay packed, with the same bits and groups, for `save`; NF4 layers become NF4 again. Rounding may
    cost more than a small adapter gains: the returned errors show it. Quantizing the float result with data
                  (llm.quantize) loses less.
    """
    if into not in ("float", "grid"):
        raise ConfigError(f"into: must be 'float' or 'grid', got {into!r}")
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _lora_layer()) and _is_packed(module.get_base_layer())
    }
    if not layers:
        raise ConfigError("model: no packed layer of it has LoRA adapters; was it made by get_peft_model?")
    about = {}
    for name, layer in layers.items():
        new, about[name] = _merge_layer(layer, into)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new)
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()  # adapters of float layers are PEFT's business
    if into == "float":
        for name, rest in [(n, m) for n, m in model.named_modules() if _is_packed(m)]:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, _float(_weight(rest).to(_dtype(rest)), rest.bias))
    prefix = "base_model.model."
    return Merged(model, {name.removeprefix(prefix): values for name, values in about.items()})


def _lora_layer() -> Any:
    try:
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise SparsebitError("merge: needs peft; pip install sparsebit[qlora]") from None
    return LoraLayer


def _merge_layer(layer: Any, into: str) -> tuple[nn.Module, dict[str, float]]:
    base = layer.get_base_layer()
    before = _weight(base)
    bias = base.bias
    dtype = _dtype(base)
    weight = before.clone()
    for adapter in (a for a in layer.active_adapters if a in layer.lora_A):
        if adapter in layer.lora_variant:  # such as DoRA
            weight = layer.lora_variant[adapter].merge_safe(layer, adapter, weight)
        else:
            weight += layer.get_delta_weight(adapter).float()
        if layer.lora_bias[adapter]:
            change = layer.lora_B[adapter].bias * layer.scaling[adapter]
            bias = change if bias is None else bias + change
    size = float((weight - before).norm())
    bias = None if bias is None else bias.to(dtype)
    if into == "float":
        new: Any = _float(weight.to(dtype), bias)
    elif is_nf4(base):
        new = nf4_layer(weight.to(dtype), bias)
    else:
        new = QuantLinear(requantize(weight, base.quantized()), bias, dtype)
    lost = float((_weight(new) - weight).norm())
    return new, {"adapter": size / max(float(before.norm()), 1e-30), "error": lost / max(size, 1e-30)}


def _is_packed(layer: Any) -> bool:
    return isinstance(layer, QuantLinear) or is_nf4(layer)


def _weight(layer: Any) -> Tensor:
    """The float32 matrix of a layer, packed or not."""
    if is_nf4(layer):
        return nf4_weight(layer)
    if isinstance(layer, QuantLinear):
        return layer.dequantize(torch.float32)
    return layer.weight.float()


def _dtype(layer: Any) -> torch.dtype:
    found: torch.dtype = (layer.compute_dtype or torch.float32) if is_nf4(layer) else layer.dtype
    return found


def _float(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def requantize(weight: Tensor, q: QuantizedWeight) -> QuantizedWeight:
    """`weight` with the bits and groups of `q`; each group has its old grid or a new one, whichever is nearer."""
    spec = spec_of(q.bits, q.group, q.symmetric)
    new = rtn(weight, None, spec, scale_dtype=q.scales.dtype, g_idx=q.g_idx)
    index = q.groups
    codes = round_to(weight, q.scales.float()[:, index], q.zeros.float()[:, index], q.bits)
    old = replace(q, codes=codes.to(torch.uint8))

    def error(grid: QuantizedWeight) -> Tensor:
        square = (grid.dequantize() - weight).square()
        return square.new_zeros(q.scales.shape).index_add_(1, index, square)

    better = error(new) < error(old)
    return replace(
        q,
        codes=torch.where(better[:, index], new.codes, old.codes),
        scales=torch.where(better, new.scales, old.scales),
        zeros=torch.where(better, new.zeros, old.zeros),
    )


def save(model: nn.Module, source: str | Path, folder: str | Path) -> None:
    """A model that was loaded from the checkpoint `source` and merged into="grid", as a checkpoint like it."""
    source = Path(source)
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"save: {folder} is not empty; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    saver = vars(model).get("save_pretrained")
    if isinstance(saver, Saver):  # a model of transformers: it knows the names of experts in the files
        saver(folder)
        (folder / CARD).unlink(missing_ok=True)  # its figures are those of the model before
    else:
        _save_own(model, source, folder)
    for path in source.iterdir():
        there = path.suffix == ".safetensors" or path.name in ("run.json", "config.json", INDEX, CARD)
        if path.is_file() and not there:
            shutil.copy(path, folder / path.name)


def _save_own(model: nn.Module, source: Path, folder: Path) -> None:
    """Save a module of the user, whose tensors have the same names in the files of `source`."""
    config = json.loads((source / "config.json").read_text())
    layout = format_of(config["quantization_config"])
    tensors = dict(model.state_dict())
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    packed = {name: m.quantized() for name, m in linears.items() if isinstance(m, QuantLinear)}
    for name, q in packed.items():
        tensors.update({f"{name}.{s}": t for s, t in layout.encode(q).items()})
    specs = {name: spec_of(q.bits, q.group, q.symmetric) for name, q in packed.items()}
    reordered = any(q.g_idx is not None for q in packed.values())
    config["quantization_config"] = layout.describe(specs, [n for n in linears if n not in packed], reordered)
    files: dict[Path, dict[str, Tensor]] = defaultdict(dict)
    for name, path in tensor_files(source).items():
        if name not in tensors:
            raise ConfigError(f"model: has no {name!r} of {source}; only merge(into='grid') keeps its layers")
        files[path][name] = tensors[name].contiguous().cpu()
    from safetensors.torch import save_file

    for path, content in files.items():
        save_file(content, folder / path.name, {"format": "pt"})
    if (source / INDEX).is_file():
        shutil.copy(source / INDEX, folder / INDEX)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
