"""Two spellings of one tensor: in transformers' checkpoints, and in the model that is built from them.

transformers renames while it loads, and it stacks experts that the files keep one by one. The same tables are used
here, in both directions, so that a folder can be read block by block and is written under the names that it had.
A model that is not transformers' has one spelling.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.llm.models.experts import Part, own_parts, stacks_of

COLUMNS = 3  # of rows that are numbered; recipes drop a dimension of size 1


@dataclass
class Entry:
    """The tensors of the files that become one tensor of the model, or several; `how` is transformers' recipe."""

    keys: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)  # of the recipe, one per key
    how: Any = None  # None: only the name differs


@dataclass
class Plan:
    """The source of every tensor of the model."""

    entries: dict[str, Entry]  # by the first tensor that the entry makes
    made: dict[str, str]  # tensor of the model -> its entry
    extra: list[str]  # keys of the files that the model has no place for

    def renamed(self) -> dict[str, str]:
        """Tensors of the model that the files have unchanged, and their keys there."""
        return {name: entry.keys[0] for name, entry in self.entries.items() if entry.how is None}

    def keys_of(self, tensors: Iterable[str]) -> list[str]:
        """The keys that these tensors of the model are made from."""
        entries = dict.fromkeys(self.made[name] for name in tensors if name in self.made)
        found: list[str] = []
        for entry in entries:
            found.extend(self.entries[entry].keys)
        return found


class Names:
    """The tables of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.state = dict(model.state_dict())
        if _is_transformers(model):
            self.prefix = getattr(model, "base_model_prefix", None)
        else:
            self.prefix = None
        self.renamings, self.converters = _split(_conversions(model, reading=True))
        self.back_names, self.back_converters = _split(_conversions(model, reading=False))
        self.parts: dict[str, list[Part]] = {}  # by stack
        self.layer_files: dict[str, str] = {}  # layer of an expert -> its name in the files
        self.unnamed: set[str] = set()  # layers of experts that the files keep in one tensor
        self.known: dict[str, str] = {}  # tensor of the model -> its key in the folder that is read
        for name, module in model.named_modules():
            for leaf, stack in stacks_of(module):
                self._name_experts(f"{name}.{leaf}".lstrip("."), stack)
        self.layers = {file: layer for layer, file in self.layer_files.items()}

    # -- from the files to the model -------------------------------------------------------------------------------
    def tensor(self, key: str) -> str:
        """The tensor of the model that a key of the files belongs to; a stack for an expert's."""
        return self._renamed(key)[0]

    def layer(self, key: str) -> str:
        """The layer of a name in the files (without its last part), under the name that it has after unfolding."""
        if key in self.layers:
            return self.layers[key]
        found = self.tensor(f"{key}.weight")
        if found in self.state:
            return found.removesuffix(".weight")
        return key

    def plan(self, keys: Iterable[str], shape_of: Callable[[str], Any]) -> Plan:
        """`shape_of` is asked where one tensor of the files becomes several."""
        entries: dict[str, Entry] = {}
        extra: list[str] = []
        for key in sorted(keys, key=_natural):
            name, pattern = self._renamed(key)
            if name not in self.state or (pattern is None and name in entries):
                extra.append(key)
                continue
            entry = entries.setdefault(name, Entry())
            entry.keys.append(key)
            entry.patterns.append(pattern or key)
            if pattern is not None and entry.how is None:
                entry.how = next(c for c in self.converters if pattern in c.source_patterns)
        made = {}
        for name, entry in entries.items():
            made.update(dict.fromkeys(self._made(name, entry, shape_of), name))
        return Plan(entries, made, extra)

    def convert(self, name: str, entry: Entry, tensors: list[Tensor]) -> dict[str, Tensor]:
        """The tensors of the model that an entry makes."""
        if entry.how is None:
            return {name: tensors[0]}
        how = copy.deepcopy(entry.how)
        for key, pattern, tensor in zip(entry.keys, entry.patterns, tensors):
            how.add_tensor(name, key, pattern, tensor)
        return _flat(how.convert(name, model=self.model, config=self.model.config))

    def from_files(self, tensors: Mapping[str, Tensor], suffixes: Sequence[str] = ()) -> dict[str, Tensor]:
        """The inverse of `to_files`; `suffixes` are those of packed layers."""
        found = {}
        floats = {}
        packed = packed_layers(tensors, suffixes)
        for key, tensor in tensors.items():
            layer, _, leaf = key.rpartition(".")
            if layer in packed and leaf in suffixes:
                found[f"{self.layer(layer)}.{leaf}"] = tensor
            else:
                floats[key] = tensor
        plan = self.plan(floats, lambda key: floats[key].shape)
        for name, entry in plan.entries.items():
            found.update(self.convert(name, entry, [floats[key] for key in entry.keys]))
        return found

    # -- from the model to the files -------------------------------------------------------------------------------
    def key(self, tensor: str) -> str | None:
        """How the files call a tensor; None where it is in them in another shape."""
        if tensor in self.known:
            return self.known[tensor]
        if any(c.rename_source_key(tensor)[1] is not None for c in self.back_converters):
            return None
        for renaming in self.back_names:
            tensor = renaming.rename_source_key(tensor)[0]
        return tensor

    def layer_file(self, layer: str) -> str:
        """How the files call a layer; a layer that they have in another shape keeps the model's name."""
        key = self.layer_files.get(layer) or self.key(f"{layer}.weight") or layer
        return key.removesuffix(".weight")

    def to_files(self, tensors: Mapping[str, Tensor], packed: Iterable[str] = ()) -> dict[str, Tensor]:
        """Tensors of the model and the stored tensors of its `packed` layers, under the names of the files."""
        layers = {*packed, *self.layer_files}
        found: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            layer, _, leaf = name.rpartition(".")
            key = self.key(name)
            if layer in layers:
                key = f"{self.layer_file(layer)}.{leaf}"
            if key is None:
                others[name] = tensor
            else:
                found[key] = tensor
        if others:
            found.update(self._reverted(others))
        return found

    def _reverted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Through transformers' recipes, backwards."""
        how: dict[str, Any] = {}
        for name in sorted(tensors, key=_natural):
            converter, renamed, pattern = next(
                (c, *found)
                for c in self.back_converters
                if (found := c.rename_source_key(name))[1] is not None
            )
            how.setdefault(renamed, copy.deepcopy(converter)).add_tensor(
                renamed, name, pattern, tensors[name]
            )
        out: dict[str, Tensor] = {}
        for name, converter in how.items():
            for key, tensor in _flat(
                converter.convert(name, model=self.model, config=self.model.config)
            ).items():
                for renaming in self.back_names:
                    key = renaming.rename_source_key(key)[0]
                out[key] = tensor
        return out

    def _name_experts(self, stack: str, tensor: Tensor) -> None:
        """The layers of a stack. Rows are numbered and sent through the recipe: the numbers that arrive show which
        layer has them."""
        owner = stack.rpartition(".")[0]
        experts = tensor.shape[0]
        rows = tensor.shape[1]
        numbers = torch.arange(experts * rows).reshape(experts, rows, 1).repeat(1, 1, COLUMNS)
        try:
            files = {}
            if self.key(stack) is None:
                files = self._reverted({stack: numbers})
        except (RuntimeError, ValueError, StopIteration):  # the recipe needs more than this one tensor
            files = {}
        parts = [_part(key, ids, rows) for key, ids in files.items()]
        if not parts or any(part is None for part in parts):
            self.parts[stack] = own_parts(stack, tensor.shape)
            layers = [f"{owner}.{part.layer}" for part in self.parts[stack]]
            self.layer_files.update(zip(layers, layers))
            self.unnamed.update(layers)
            return
        self.parts[stack] = sorted((p for p in parts if p is not None), key=lambda p: (p.expert, p.rows))
        for part, key in zip(parts, files):
            if part is not None:
                self.layer_files[f"{owner}.{part.layer}"] = key.removesuffix(".weight")

    def _made(self, name: str, entry: Entry, shape_of: Callable[[str], Any]) -> list[str]:
        if entry.how is None or len(entry.how.target_patterns) == 1:
            return [name]
        shapes = [torch.empty(tuple(shape_of(key)), device="meta") for key in entry.keys]
        return list(self.convert(name, entry, shapes))

    def _renamed(self, key: str) -> tuple[str, str | None]:
        if self.prefix is None:
            return key, None
        from transformers.core_model_loading import rename_source_key

        found, pattern = rename_source_key(key, self.renamings, self.converters, self.prefix, self.state)
        if found not in self.state and key in self.state:
            return key, None
        return found, pattern


def packed_layers(keys: Iterable[str], suffixes: Sequence[str]) -> set[str]:
    """The layers that these keys hold packed: those with the first suffix of a format."""
    found: set[str] = set()
    for leaf in suffixes[:1]:
        for key in keys:
            if key.endswith("." + leaf):
                found.add(key.removesuffix("." + leaf))
    return found


def _part(key: str, ids: Tensor, rows: int) -> Part | None:
    """The rows that a key holds; None unless they are a run of rows of one expert."""
    if ids.dim() != 2 or ids.shape[1] != COLUMNS or not key.endswith(".weight"):
        return None
    first = int(ids[0, 0])
    if not torch.equal(ids[:, 0], torch.arange(first, first + len(ids))) or first % rows + len(ids) > rows:
        return None
    leaf = key.removesuffix(".weight").rpartition(".")[2]
    expert = first // rows
    return Part(expert, f"{expert}.{leaf}", (first % rows, first % rows + len(ids)))


def _is_transformers(model: nn.Module) -> bool:
    library = sys.modules.get("transformers")  # a model of it cannot be there without it
    return library is not None and isinstance(model, library.PreTrainedModel)


def _conversions(model: Any, reading: bool) -> list[Any]:
    """transformers' own list for this model; empty where its version has none."""
    if not _is_transformers(model):
        return []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:  # names are then compared without a change, and a mismatch is refused
        return []
    if reading:
        return list(get_model_conversion_mapping(model))
    found = get_model_conversion_mapping(model, add_legacy=False)
    return [c.reverse_transform() for c in found[::-1] if not isinstance(c, PrefixChange)]


def _split(conversions: list[Any]) -> tuple[list[Any], list[Any]]:
    """Split the steps into those that only rename, and those that compute."""
    computes = [c for c in conversions if hasattr(c, "operations")]
    return [c for c in conversions if not hasattr(c, "operations")], computes


def _flat(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, t in tensors.items():
        found[name] = t[0] if isinstance(t, list) else t
    return found


def _natural(name: str) -> list[tuple[int, Any]]:
    """Numbers by their size: expert 10 comes after expert 9."""
    found: list[tuple[int, Any]] = []
    for part in name.split("."):
        found.append((0, int(part)) if part.isdigit() else (1, part))
    return found
