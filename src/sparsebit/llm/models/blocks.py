"""Where a model keeps its blocks. A tower is a list of modules with Linear layers in them that run one after the other:
a decoder has one, an encoder-decoder two, a vision-language model one for pictures and one for words.

An architecture is not declared, it is found in the module tree, and the finding can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from sparsebit.errors import ConfigError
from sparsebit.llm.models.experts import is_conv1d, is_linear, layer_sizes, stacks_of
from sparsebit.llm.models.names import Names


@dataclass(frozen=True)
class Tower:
    """One list of blocks, and the layers in each."""

    path: str
    linears: tuple[tuple[str, ...], ...]  # names inside each block
    weights: int  # in those layers

    def __len__(self) -> int:
        return len(self.linears)

    def prefix(self, block: int) -> str:
        return f"{self.path}.{block}."

    def __str__(self) -> str:
        layers = sum(len(names) for names in self.linears)
        return f"{len(self)} blocks in {self.path!r}, {layers} layers with {self.weights:,} weights"


@dataclass(frozen=True)
class Layout:
    """The result of `find_blocks`. The blocks of all quantized towers have one common numbering."""

    towers: tuple[Tower, ...]  # that are quantized
    kept: tuple[tuple[str, int], ...]  # matrices that stay float: name, number of weights
    other: str = ""  # layers that are no Linear, and their treatment
    left: tuple[Tower, ...] = ()  # that stay float

    @cached_property
    def places(self) -> list[tuple[Tower, int]]:
        """The tower of each block, and its number there."""
        found: list[tuple[Tower, int]] = []
        for tower in self.towers:
            for i in range(len(tower)):
                found.append((tower, i))
        return found

    @property
    def path(self) -> str:
        """The path of the largest tower."""
        return max(self.towers, key=lambda tower: tower.weights).path

    @property
    def linears(self) -> tuple[tuple[str, ...], ...]:
        return tuple(names for tower in self.towers for names in tower.linears)

    @property
    def weights(self) -> int:
        return sum(tower.weights for tower in self.towers)

    def __len__(self) -> int:
        return len(self.places)

    def prefix(self, block: int) -> str:
        tower, i = self.places[block]
        return tower.prefix(i)

    def names(self) -> list[str]:
        found: list[str] = []
        for i, names in enumerate(self.linears):
            for name in names:
                found.append(self.prefix(i) + name)
        return found

    def inside(self, name: str) -> bool:
        """True if a tensor belongs to a block that is quantized."""
        return any(name.startswith(tower.path + ".") for tower in self.towers)

    def __str__(self) -> str:
        kept = sum(size for _, size in self.kept)
        lines = [f"{tower};" for tower in self.towers]
        lines[-1] += f" {kept:,} weights in other matrices stay float"
        for tower in self.towers:
            for names in dict.fromkeys(tower.linears):
                same = [i for i, other in enumerate(tower.linears) if other == names]
                where = "block"
                if len(self.towers) > 1:
                    where = f"{tower.path}, block"
                lines.append(f"  {where} {_ranges(same)}: {', '.join(names)}")
        lines += [f"  {self.other}"] if self.other else []
        lines += [f"  float: {tower}; to quantize it too, name it in towers=" for tower in self.left]
        apart = tuple(tower.path + "." for tower in self.left)
        shown = [(name, size) for name, size in self.kept if not name.startswith(apart)]
        return "\n".join(lines + [f"  float: {name} ({size:,})" for name, size in shown])


def find_blocks(
    model: nn.Module, path: str | None = None, towers: str | Sequence[str] | None = None
) -> Layout:
    """The towers of `model`, and which of them are quantized.

    path    the ModuleList of the only one, where it is not found by itself.
    towers  names, or parts of names, of those that are quantized; "all". None: both of an encoder-decoder,
            else the one that makes words.
    """
    if path is not None and towers is not None:
        raise ConfigError("blocks and towers: both choose the layers that are quantized; give one of them")
    names = Names(model)
    if path is not None:
        found = [_tower(model, path, names)]
    else:
        found = find_towers(model, names)
    chosen = _chosen(model, found, towers)
    _check_shared(model, chosen)
    inside = set()
    for tower in chosen:
        for i, b in enumerate(tower.linears):
            for name in b:
                inside.add(f"{tower.path}.{i}.{name}")
    covered = {f"{name}.weight" for name in inside}
    for stack, parts in names.parts.items():
        owner = stack.rpartition(".")[0]
        covered |= {stack} if parts and f"{owner}.{parts[0].layer}" in inside else set()
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    kept = tuple((name, p.numel()) for name, p in matrices.items() if name not in covered)
    lists = [model.get_submodule(tower.path) for tower in chosen]
    left = tuple(tower for tower in found if tower not in chosen)
    return Layout(tuple(chosen), kept, _others(lists), left)


def find_towers(model: nn.Module, names: Names) -> list[Tower]:
    """Every list of blocks, in the order of the module tree. The largest list is found first and claims the modules
    inside it."""
    lists = _lists(model)
    known = {name: _weights(module) for name, module in lists.items()}
    # of equals the outermost: it comes first
    largest = max(known, key=lambda name: known[name], default=None)
    if largest is None or not known[largest]:
        raise ConfigError(
            "model: no ModuleList of decoder blocks with nn.Linear layers in it; name it with blocks='path.of.it'"
        )
    paths = [largest]
    for name, module in lists.items():
        apart = not any(_nested(name, other) for other in paths)
        if apart and isinstance(module, nn.ModuleList) and all(_is_block(block) for block in module):
            paths.append(name)
    return [_tower(model, name, names) for name in lists if name in paths]


def _chosen(model: Any, found: list[Tower], towers: str | Sequence[str] | None) -> list[Tower]:
    if isinstance(towers, str):
        asked = [towers]
    elif towers is not None:
        asked = list(towers)
    else:
        asked = None
    if asked == ["all"] or (len(found) == 1 and asked is None):
        return found
    if asked is None:
        return _usual(model, found)
    there = ", ".join(repr(tower.path) for tower in found)
    for name in asked:
        if not any(_called(tower, name) for tower in found):
            raise ConfigError(f"towers: no tower is called {name!r}; there are: {there}; or say 'all'")
    if not asked:
        raise ConfigError(f"towers: is empty, so that nothing is quantized; there are: {there}")
    result: list[Tower] = []
    for tower in found:
        if any(_called(tower, name) for name in asked):
            result.append(tower)
    return result


def _check_shared(model: nn.Module, towers: list[Tower]) -> None:
    """Refuses blocks that have one matrix in common: it would be solved twice, for different inputs."""
    seen: dict[int, str] = {}
    for tower in towers:
        blocks = model.get_submodule(tower.path)
        for name, parameter in blocks.named_parameters(tower.path, remove_duplicate=False):
            first = seen.setdefault(id(parameter), name)
            if first != name and parameter.dim() > 1:
                raise ConfigError(
                    f"model: {first!r} and {name!r} are one matrix, and blocks that share layers cannot be quantized "
                    "one after the other; quantize another tower (towers=), or untie them and pass the module"
                )


def _usual(model: Any, found: list[Tower]) -> list[Tower]:
    """An encoder-decoder's towers all; of others the one that makes words."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return found
    decoder = None
    if hasattr(model, "get_decoder"):
        decoder = model.get_decoder()
    inside = {name for name, module in model.named_modules() if decoder is not None and module is decoder}
    words = []
    for tower in found:
        if any(tower.path.startswith(name + ".") for name in inside):
            words.append(tower)
    return [max(words or found, key=lambda tower: tower.weights)]


def _called(tower: Tower, name: str) -> bool:
    """Does the name mean this tower: by its path, or by whole parts of it ('vision_tower', 'encoder.layers')?"""
    return f".{name}." in f".{tower.path}."


def _tower(model: nn.Module, path: str, names: Names) -> Tower:
    lists = _lists(model)
    if path not in lists:
        raise ConfigError(
            f"blocks: {path!r} is not a ModuleList of this model; there are: {', '.join(lists) or 'none'}"
        )
    sizes = [
        layer_sizes(block, lambda stack, shape, i=i: names.parts[f"{path}.{i}.{stack}"])  # type: ignore[misc]
        for i, block in enumerate(lists[path])
    ]
    weights = sum(sum(block.values()) for block in sizes)
    if not weights:
        raise ConfigError(
            f"blocks: {path!r} has no Linear layer in any of its {len(sizes)} blocks, so that nothing would be "
            f"quantized; leave blocks= out, or name another: {', '.join(n for n in lists if _weights(lists[n]))}"
        )
    return Tower(path, tuple(tuple(block) for block in sizes), weights)


def _lists(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module):
            found[name] = module
    return found


def _is_block(block: nn.Module) -> bool:
    """Has Linear layers, and is not one itself, as in a list of heads."""
    names = layer_sizes(block)
    return len(names) > 1 and "" not in names


def _nested(a: str, b: str) -> bool:
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def _others(lists: list[nn.Module]) -> str:
    """A line about layers that are no Linear."""
    modules: list[nn.Module] = []
    for blocks in lists:
        modules.extend(blocks.modules())
    turned = sum(is_conv1d(m) for m in modules)
    stacks = sum(len(list(stacks_of(m))) for m in modules)
    found = [f"{turned} Conv1D"] * bool(turned) + [f"{stacks} tensors of stacked experts"] * bool(stacks)
    if found:
        return f"{' and '.join(found)} are stored as Linear layers: llm.load reads them"
    return ""


def linears_of(block: nn.Module) -> dict[str, nn.Linear]:
    """The layers that are quantized, of a block that is unfolded."""
    return {name: module for name, module in block.named_modules() if is_linear(module)}


def _weights(blocks: Any) -> int:
    return sum(sum(layer_sizes(block).values()) for block in blocks)


def _ranges(numbers: list[int]) -> str:
    """0-4, 7: runs of numbers."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
