"""The stored form of a block: packed weights in place of float ones, under the names of the files; and back."""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor, nn

from sparsebit.llm.formats import Format
from sparsebit.llm.methods import Solved
from sparsebit.llm.models.blocks import linears_of
from sparsebit.llm.models.experts import fold_back, unfold_tensors
from sparsebit.llm.models.sources import InMemory
from sparsebit.llm.walk.job import Job
from sparsebit.llm.walk.solve import set_weight


def stored_tensors(
    source: InMemory, index: int, block: nn.Module, solved: dict[str, Solved], layout: Format
) -> dict[str, Tensor]:
    """The state of the block with packed weights in place of float ones, under the names of the files."""
    prefix = source.layout.prefix(index)
    tensors: dict[str, Tensor] = {}
    for key, value in block.state_dict().items():
        name, _, leaf = key.rpartition(".")
        if name in solved and leaf == "weight":
            for suffix, tensor in layout.encode(solved[name]).items():
                tensors[f"{name}.{suffix}"] = tensor
        else:
            tensors[key] = value
    packed: Container[str] = solved
    if layout.plain:
        packed = ()
    tensors = fold_back(source.blocks[index], tensors, source.naming(index), packed)
    named = {prefix + key: value for key, value in tensors.items()}
    packed_names = []
    if not layout.plain:
        packed_names = [prefix + name for name in solved]
    return source.names.to_files(named, packed_names)


def restore(source: InMemory, index: int, block: nn.Module, stored: dict[str, Tensor], job: Job) -> None:
    """Put the stored tensors of a block into it. Layers that stayed float leave `job.specs`."""
    prefix = source.layout.prefix(index)
    suffixes: tuple[str, ...] = job.format.suffixes
    packed = [name.removeprefix(prefix) for name in job.specs]
    if job.format.plain:
        suffixes = ()
        packed = []
    local = {}
    for name, tensor in source.names.from_files(stored, suffixes).items():
        local[name.removeprefix(prefix)] = tensor
    local = unfold_tensors(source.blocks[index], local, source.naming(index), packed)
    linears = linears_of(block)
    for full_name, spec in list(job.specs.items()):
        name = full_name.removeprefix(prefix)
        if name not in linears or prefix + name not in job.specs:
            continue
        parts = {s: local[f"{name}.{s}"] for s in job.format.suffixes if f"{name}.{s}" in local}
        if job.format.suffixes[0] not in parts:  # the layer stayed float
            del job.specs[prefix + name]
            continue
        set_weight(linears[name], job.format.decode(parts, spec))
        for suffix in parts:
            local.pop(f"{name}.{suffix}")
    block.load_state_dict(local, strict=False, assign=True)  # norms and biases with scales folded in
