"""Where the float weights come from: a model in memory, or the safetensors of a folder, read block by block.

Either way the caller gets blocks of its own; the user's model is never written to.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.llm.blocks import Layout, find_blocks
from sparsebit.llm.experts import unfold, weight_of


class InMemory:
    """A model that is there as a whole."""

    folder: Path | None = None

    def __init__(self, model: nn.Module, blocks: str | None = None) -> None:
        self.model = model
        self.layout = find_blocks(model, blocks)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.get_submodule(self.layout.path)  # type: ignore[return-value]

    def block(self, index: int) -> nn.Module:
        return unfold(copy.deepcopy(self.blocks[index]).eval())

    def first_rows(self) -> Iterator[Tensor]:
        """The first row of every layer: enough to tell two models apart."""
        for block, names in zip(self.blocks, self.layout.linears):
            for name in names:
                yield weight_of(block, name)[:1].detach()

    def rest(self) -> dict[str, Tensor]:
        """What lies outside the blocks; of tied weights one."""
        return without_ties(self.model, self.layout)


class OnDisk(InMemory):
    """A folder in transformers' layout: the model is built without weights, and each block is read when it is due."""

    def __init__(self, folder: Path, blocks: str | None = None) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.folder = folder
        self.files = tensor_files(folder)
        config = AutoConfig.from_pretrained(folder)
        with weightless():
            model = AutoModelForCausalLM.from_config(config)
        super().__init__(model.eval(), blocks)
        self.dtype = config.dtype or torch.float32
        rest = [name for name in model.state_dict() if not name.startswith(self.layout.path + ".")]
        self.model.load_state_dict(
            self._read([n for n in rest if n in self.files]), strict=False, assign=True
        )
        tie_weights(self.model)
        missing = [n for n, p in self.model.named_parameters() if p.is_meta and n in rest]
        self._complain(missing)

    def block(self, index: int) -> nn.Module:
        block, prefix = copy.deepcopy(self.blocks[index]), self.layout.prefix(index)
        names = list(block.state_dict())
        self._complain([prefix + n for n in names if prefix + n not in self.files])
        tensors = self._read([prefix + n for n in names])
        block.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items()}, assign=True)
        return unfold(block.eval().requires_grad_(False))

    def first_rows(self) -> Iterator[Tensor]:
        from safetensors import safe_open

        for name in self.layout.names():
            stack, _, index = name.rpartition(".")
            own = f"{name}.weight" in self.files or stack not in self.files
            key = f"{name}.weight" if own else stack
            self._complain([] if key in self.files else [key])
            with safe_open(str(self.files[key]), framework="pt") as file:
                part = file.get_slice(key)
                yield part[:1] if own else part[int(index), :1]

    def _complain(self, missing: list[str]) -> None:
        if missing:
            raise ConfigError(
                f"{self.folder}: {len(missing)} tensors of the model are not in its files, such as {missing[0]!r}; "
                "load it with transformers and pass the model instead of the folder"
            )

    def _read(self, names: list[str]) -> dict[str, Tensor]:
        return {name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor
                for name, tensor in read_tensors(self.files, names)}  # fmt: skip


def open_source(model: Any, blocks: str | None = None) -> InMemory:
    """A module, or the folder of one."""
    if isinstance(model, nn.Module):
        return InMemory(model, blocks)
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model: {folder} is no folder with a config.json; pass a folder or an nn.Module")
    return OnDisk(folder, blocks)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {k: folder / v for k, v in json.loads(index.read_text())["weight_map"].items()}
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            found.update(dict.fromkeys(file.keys(), path))
    if not found:
        raise ConfigError(f"{folder}: holds no safetensors; save the model with save_pretrained() first")
    return found


def read_tensors(files: dict[str, Path], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors, file by file."""
    from safetensors import safe_open

    for path in sorted({files[name] for name in names}):
        with safe_open(str(path), framework="pt") as file:
            for name in names:
                if files[name] == path:
                    yield name, file.get_tensor(name)


def without_ties(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """The state outside the blocks, tied tensors under their first name only."""
    seen: set[int] = set()
    state = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(layout.path + ".") or tensor.data_ptr() in seen:
            continue
        if tensor.numel():
            seen.add(tensor.data_ptr())
        state[name] = tensor.detach().contiguous()
    return state


def tie_weights(model: Any) -> None:
    """transformers' own way to make tied weights one again."""
    if hasattr(model, "tie_weights"):
        model.tie_weights()


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
