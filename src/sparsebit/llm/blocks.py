"""Where a decoder keeps its blocks: the list of modules that holds most weights of Linear layers.

An architecture is not declared, it is found in the module tree, and the finding can be read.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from sparsebit.errors import ConfigError
from sparsebit.llm.experts import is_conv1d, layer_sizes, stacks_of


@dataclass(frozen=True)
class Layout:
    """What `find_blocks` found: the list of blocks, the layers in each, and the weights that stay as they are."""

    path: str  # of the ModuleList
    linears: tuple[tuple[str, ...], ...]  # names inside each block
    weights: int  # in those layers
    kept: tuple[tuple[str, int], ...]  # matrices that stay float: name, number of weights
    other: str = ""  # layers that are no Linear: what is done with them

    def __len__(self) -> int:
        return len(self.linears)

    def prefix(self, block: int) -> str:
        return f"{self.path}.{block}."

    def names(self) -> list[str]:
        return [self.prefix(i) + name for i, names in enumerate(self.linears) for name in names]

    def __str__(self) -> str:
        kept = sum(size for _, size in self.kept)
        lines = [
            f"{len(self)} blocks in {self.path!r}, {len(self.names())} layers with {self.weights:,} weights;"
            f" {kept:,} weights in other matrices stay float"
        ]
        for names in dict.fromkeys(self.linears):
            same = [i for i, other in enumerate(self.linears) if other == names]
            lines.append(f"  block {_ranges(same)}: {', '.join(names)}")
        lines += [f"  {self.other}"] if self.other else []
        return "\n".join(lines + [f"  float: {name} ({size:,})" for name, size in self.kept])


def find_blocks(model: nn.Module, path: str | None = None) -> Layout:
    """The decoder blocks of `model`; `path` names their ModuleList where the largest one is not it."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module)
    }
    if path is None:
        sizes = {name: sum(_weights(b) for b in blocks) for name, blocks in lists.items()}
        path = max(
            sizes, key=lambda name: sizes[name], default=None
        )  # of equals the outermost: it comes first
        if path is None or not sizes[path]:
            raise ConfigError(
                "model: no ModuleList of decoder blocks with nn.Linear layers in it; name it with blocks='path.of.it'"
            )
    elif path not in lists:
        raise ConfigError(
            f"blocks: {path!r} is no ModuleList of this model; there are: {', '.join(lists) or 'none'}"
        )
    sizes_of = [layer_sizes(block) for block in lists[path]]
    inside = {f"{path}.{i}.{name}.weight" for i, names in enumerate(sizes_of) for name in names}
    inside |= {
        name.removesuffix(".weight").rpartition(".")[0] for name in inside
    }  # stacks, by their own names
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    kept = tuple((name, p.numel()) for name, p in matrices.items() if name not in inside)
    weights = sum(sum(names.values()) for names in sizes_of)
    return Layout(path, tuple(tuple(names) for names in sizes_of), weights, kept, _others(lists[path]))


def _others(blocks: nn.Module) -> str:
    """A line about layers that are no Linear."""
    turned = sum(is_conv1d(m) for m in blocks.modules())
    stacks = sum(len(list(stacks_of(m))) for m in blocks.modules())
    found = [f"{turned} Conv1D"] * bool(turned) + [f"{stacks} tensors of stacked experts"] * bool(stacks)
    return f"{' and '.join(found)} are stored as Linear layers: llm.load reads them" if found else ""


def linears_of(block: nn.Module) -> dict[str, nn.Linear]:
    """The layers that are quantized, of a block that is unfolded."""
    return {name: module for name, module in block.named_modules() if type(module) is nn.Linear}


def _weights(block: nn.Module) -> int:
    return sum(layer_sizes(block).values())


def _ranges(numbers: list[int]) -> str:
    """0-4, 7: runs of numbers."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
