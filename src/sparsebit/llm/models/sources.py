"""Where the float weights come from: a model in memory, or the safetensors of a folder, read block by block.

In both cases the caller gets copies of the blocks; the user's model is never changed.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.llm.models.blocks import find_blocks
from sparsebit.llm.models.experts import Naming, unfold
from sparsebit.llm.models.names import Names
from sparsebit.llm.models.skeleton import first_line, make_up, read_config, read_json, skeleton, tie_weights


class InMemory:
    """A model that is there as a whole."""

    folder: Path | None = None
    extra: tuple[str, ...] = ()  # tensors of the source that the model has no place for; they are copied

    def __init__(
        self, model: nn.Module, blocks: str | None = None, towers: str | Sequence[str] | None = None
    ) -> None:
        self.model = model
        self.layout = find_blocks(model, blocks, towers)
        self.names = Names(model)

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of all quantized towers, one behind the other."""
        lists: list[Any] = [self.model.get_submodule(tower.path) for tower in self.layout.towers]
        return nn.ModuleList(block for blocks in lists for block in blocks)

    def naming(self, index: int) -> Naming:
        """How the experts of a block are called."""
        return lambda stack, shape: self.names.parts[self.layout.prefix(index) + stack]

    def block(self, index: int) -> nn.Module:
        return unfold(copy.deepcopy(self.blocks[index]).eval(), self.naming(index))

    def sample(self, index: int) -> nn.Module:
        """A block of the model as it came, to see what blocks return; run in the middle of a forward, so without the
        hooks with which transformers collects hidden states."""
        block = self.block(index)
        for module in block.modules():
            module._forward_hooks.clear()
        return block

    def first_rows(self) -> Iterator[Tensor]:
        """The first row of every matrix: enough to tell two models apart."""
        for block in self.blocks:
            for parameter in block.parameters():
                if parameter.dim() > 1:
                    yield parameter.flatten(0, -2)[:1].detach()

    def rest(self) -> dict[str, Tensor]:
        """The tensors outside the blocks, under the names of the files; one of each pair of tied weights."""
        tied = tied_names(self.model)
        state = {}
        for n, t in self.model.state_dict().items():
            if not self.layout.inside(n) and n not in tied:
                state[n] = t
        return self.names.to_files({name: t.detach().contiguous() for name, t in state.items()})

    def extras(self) -> dict[str, Tensor]:
        """Tensors of the files that have no place in the model, unchanged."""
        return {}


class OnDisk(InMemory):
    """A folder in transformers' layout: the model is built without weights, and each block is read when it is due."""

    def __init__(
        self, folder: Path, blocks: str | None = None, towers: str | Sequence[str] | None = None
    ) -> None:
        if read_config(folder).get("quantization_config"):
            raise ConfigError(
                f"{folder}: is quantized already (config.json has a quantization_config); pass the float checkpoint"
            )
        self.folder = folder
        self.files = tensor_files(folder)
        super().__init__(skeleton(folder).eval(), blocks, towers)
        self.plan = self.names.plan(self.files, self._shape)
        self.names.known = self.plan.renamed()
        self.extra = tuple(self.plan.extra)
        self.dtypes = _dtypes(self.model)
        self.made_up = set(self._complain())
        rest = [name for name in self.names.state if not self.layout.inside(name)]
        self.model.load_state_dict(self._read(rest), strict=False, assign=True)
        tie_weights(self.model, set(self.plan.made) | self.made_up)

    def block(self, index: int) -> nn.Module:
        block = copy.deepcopy(self.blocks[index])
        prefix = self.layout.prefix(index)
        tensors = self._read([prefix + name for name in block.state_dict()])
        block.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items()}, assign=True)
        return unfold(block.eval().requires_grad_(False), self.naming(index))

    def first_rows(self) -> Iterator[Tensor]:
        for key in self.plan.keys_of(name for name in self.names.state if self.layout.inside(name)):
            with opened(self.files[key]) as file:
                part = file.get_slice(key)
                if len(part.get_shape()) > 1:
                    yield part[:1].flatten(0, -2)[:1]

    def extras(self) -> dict[str, Tensor]:
        return dict(read_tensors(self.files, self.extra))

    def _complain(self) -> list[str]:
        """Every tensor of the model has to come from the files, before anything else is done.

        Those that the class computes are made here, and named.
        """
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        there = set(self.plan.made)
        there |= {name for pair in tied.items() if there & set(pair) for name in pair}
        there |= {a for a, b in tied.items() if b in there}
        missing = [name for name in self.names.state if name not in there]
        made = make_up(self.model, [name for name in missing if not self.layout.inside(name)])
        missing = [name for name in missing if name not in made]
        if missing:
            raise ConfigError(
                f"{self.folder}: {len(missing)} tensors of {type(self.model).__name__} are not in its files, such as "
                f"{missing[0]!r}; load it with transformers and pass the model instead of the folder"
            )
        return made

    def _shape(self, key: str) -> list[int]:
        with opened(self.files[key]) as file:
            found: list[int] = file.get_slice(key).get_shape()
        return found

    def _read(self, names: list[str]) -> dict[str, Tensor]:
        """Tensors of the model, with the dtypes that transformers gives them; only these are read."""
        wanted = dict.fromkeys(self.plan.made[name] for name in names if name in self.plan.made)
        keys = [key for name in wanted for key in self.plan.entries[name].keys]
        parts = dict(read_tensors(self.files, keys))
        found: dict[str, Tensor] = {}
        for name in wanted:
            entry = self.plan.entries[name]
            found.update(self.names.convert(name, entry, [parts.pop(key) for key in entry.keys]))
        for name, tensor in found.items():
            self._check(name, tensor)
            if tensor.is_floating_point():
                found[name] = tensor.to(self.dtypes[name])
        return found

    def _check(self, name: str, tensor: Tensor) -> None:
        expected = self.names.state[name].shape
        if tensor.shape != expected:
            raise ConfigError(
                f"{self.folder}: {name} is {tuple(tensor.shape)} in the files, but {tuple(expected)} in the model that "
                "config.json describes; they do not belong together"
            )


def open_source(model: Any, blocks: str | None = None, towers: str | Sequence[str] | None = None) -> InMemory:
    """A module, or the folder of one."""
    if isinstance(model, nn.Module):
        return InMemory(model, blocks, towers)
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model: {folder} is not a folder with a config.json; pass a folder or an nn.Module"
        )
    return OnDisk(folder, blocks, towers)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict):
            raise ConfigError(f"{index}: has no weight_map; copy or download it again")
        for name in sorted(set(where.values())):
            if not (folder / name).is_file():
                raise ConfigError(
                    f"{folder / name}: is missing, but {index.name} names it; download it again"
                )
        return {key: folder / name for key, name in where.items()}
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with opened(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    if not found:
        raise ConfigError(f"{folder}: holds no safetensors; save the model with save_pretrained() first")
    return found


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file. The error names a file that is missing, cut short, or different from the index."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, FileNotFoundError) as error:
        if not path.exists():
            what = "is missing"
        else:
            what = f"cannot be read: {first_line(error)}"
        raise ConfigError(f"{path}: {what}; copy or download the file again") from error


def read_tensors(files: dict[str, Path], names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors, file by file."""
    where: dict[Path, list[str]] = {}
    for name in names:
        where.setdefault(files[name], []).append(name)
    for path in sorted(where):
        with opened(path) as file:
            for name in where[path]:
                yield name, file.get_tensor(name)


def tied_names(model: nn.Module) -> set[str]:
    """The names of tied tensors, without the one name that checkpoints use."""
    declared = getattr(model, "all_tied_weights_keys", None)
    if isinstance(declared, dict):
        second = set(declared)
    else:
        second = set()
    state = model.state_dict()
    seen: set[Any] = set()
    tied = set()
    for name in sorted(state, key=lambda name: name in second):
        tensor = state[name]
        known = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.is_meta or not tensor.numel():
            continue
        if known in seen:
            tied.add(name)
        seen.add(known)
    return tied


def _dtypes(model: Any) -> dict[str, torch.dtype]:
    """The dtypes in which transformers loads tensors: that of the config, except for those that a model keeps in
    float32."""
    found = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    plan = {}
    if hasattr(model, "_get_dtype_plan"):
        plan = model._get_dtype_plan(model.dtype)
    for name in found:
        for pattern, dtype in plan.items():
            if re.search(pattern.replace("*", ".*"), name):
                found[name] = dtype
    return found
