"""Decoder blocks one after the other: measure, solve, store, and hand the quantized block's outputs on.

Only one block and the activations between two blocks are in memory. A block that is already stored is read instead of
solved, with the same outputs, so a run that was killed ends in the same bytes.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import SparsebitError
from sparsebit.llm.blocks import linears_of
from sparsebit.llm.capture import Captured
from sparsebit.llm.formats import Format
from sparsebit.llm.methods import IGNORES_DATA, METHODS, NEEDS_DATA
from sparsebit.llm.sources import InMemory
from sparsebit.llm.statistics import collect, sharing
from sparsebit.llm.store import Store
from sparsebit.numeric.gptq import Statistics, output_error
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.rtn import rtn
from sparsebit.numeric.spec import QuantSpec


@dataclass(frozen=True)
class Job:
    """What is done to every block."""

    method: str
    specs: dict[str, QuantSpec]  # by the layer's full name
    options: dict[str, Any]
    format: Format
    scale_dtype: torch.dtype
    true_sequential: bool = True
    match_float: bool = True


@torch.no_grad()
def walk(source: InMemory, captured: Captured | None, job: Job, store: Store) -> Iterator[int]:
    """Yields each block's number when it is stored."""
    hidden = captured.hidden if captured else []
    float_hidden = list(hidden) if job.match_float and captured else None
    for i in range(len(source.layout)):
        block, prefix = source.block(i), source.layout.prefix(i)
        float_block = copy.deepcopy(block) if float_hidden is not None else None
        calls = captured.calls[i] if captured else []
        if store.has(i):
            restore(block, prefix, store.read(i), job)
        else:
            solved, about = _solve_block(_Lanes(block, calls, hidden, float_block, float_hidden), prefix, job)
            store.write(i, _tensors(block, prefix, solved, job.format), about)
        for b, call in enumerate(calls):
            hidden[b] = _checked(call.run(block, hidden[b]), prefix)
            if float_hidden is not None and float_block is not None:
                float_hidden[b] = call.run(float_block, float_hidden[b])
        del block, float_block
        gc.collect()  # modules and the hooks on them are cycles: without this several blocks stay alive
        yield i


@dataclass
class _Lanes:
    """A block that is being quantized on what quantized blocks before it give, and its float twin."""

    block: nn.Module
    calls: list[Any]
    hidden: list[Tensor]
    float_block: nn.Module | None
    float_hidden: list[Tensor] | None

    def collect(self, groups: list[list[str]]) -> dict[str, Statistics]:
        return collect(self.block, groups, self.calls, self.hidden, self.float_block, self.float_hidden)


def _solve_block(
    lanes: _Lanes, prefix: str, job: Job
) -> tuple[dict[str, QuantizedWeight], dict[str, dict[str, Any]]]:
    """Stage after stage (layers that read one tensor); without true_sequential all layers are one stage."""
    linears = {n: m for n, m in linears_of(lanes.block).items() if prefix + n in job.specs}
    measured = job.method not in IGNORES_DATA and bool(lanes.calls)
    groups = [list(linears)]
    if measured:
        groups = sharing(lanes.block, linears, lanes.calls[0], lanes.hidden[0])
    stages = [[group] for group in groups] if job.true_sequential else [groups]
    solved, about = {}, {}
    for stage in stages:
        statistics = lanes.collect(stage) if measured else {}
        for name in (name for group in stage for name in group):
            spec, seen = job.specs[prefix + name], statistics.get(name)
            solved[name], about[prefix + name] = solve(linears[name], seen, spec, job, prefix + name)
        for name in (name for group in stage for name in group):
            set_weight(linears[name], solved[name])
    return solved, about


def solve(
    linear: nn.Linear, statistics: Statistics | None, spec: QuantSpec, job: Job, name: str
) -> tuple[QuantizedWeight, dict[str, Any]]:
    """One layer; one that no token reached (an expert that is never chosen) is rounded to nearest."""
    about: dict[str, Any] = {"bits": spec.bits}
    try:
        if statistics is None and job.method in NEEDS_DATA:
            q = rtn(linear.weight, None, spec, scale_dtype=job.scale_dtype)
            about["note"] = "no calibration token reached this layer: rounded to nearest"
        else:
            q = METHODS[job.method](
                linear.weight, statistics, spec, scale_dtype=job.scale_dtype, **job.options
            )
    except SparsebitError as error:
        raise type(error)(f"{name}: {error}") from error
    about["stored_bits"] = round(q.stored_bits(), 4)
    if statistics is not None:
        h, w = statistics.hessian.double(), linear.weight.double()
        signal = ((w @ h) * w).sum().clamp(min=1e-30)
        about["error"] = float(f"{float(output_error(w, h, q).sum() / signal):.4g}")
    return q, about


def set_weight(linear: nn.Linear, q: QuantizedWeight) -> None:
    linear.weight = nn.Parameter(q.dequantize(linear.weight.dtype), requires_grad=False)


def restore(block: nn.Module, prefix: str, tensors: dict[str, Tensor], job: Job) -> None:
    """Puts what is stored of a block into it."""
    local = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    linears = linears_of(block)
    for name, spec in job.specs.items():
        name = name.removeprefix(prefix)
        if name in linears and prefix + name in job.specs:
            parts = {s: local[f"{name}.{s}"] for s in job.format.suffixes if f"{name}.{s}" in local}
            q = job.format.decode(parts, spec)
            set_weight(linears[name], q)


def _tensors(
    block: nn.Module, prefix: str, solved: dict[str, QuantizedWeight], layout: Format
) -> dict[str, Tensor]:
    """The block's state with packed weights in place of float ones."""
    tensors = {}
    for key, value in block.state_dict().items():
        name, _, leaf = key.rpartition(".")
        if name in solved and leaf == "weight":
            tensors.update({f"{prefix}{name}.{s}": t for s, t in layout.encode(solved[name]).items()})
        else:
            tensors[prefix + key] = value
    return tensors


def _checked(hidden: Tensor, prefix: str) -> Tensor:
    if not bool(torch.isfinite(hidden).all()):
        raise SparsebitError(
            f"{prefix[:-1]}: its output has NaN or Inf; try another dtype or calibration data"
        )
    return hidden
