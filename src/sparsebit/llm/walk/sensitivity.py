"""The cost of each layer at each width: the change of its block's output when that layer alone is quantized.

Squared error over squared output, token by token, because the norm that follows divides by the token's size (and a
few tokens are a thousand times larger than the others).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsebit.llm.models.blocks import linears_of
from sparsebit.llm.models.sources import InMemory
from sparsebit.llm.walk.capture import Call
from sparsebit.llm.walk.job import Job
from sparsebit.llm.walk.lane import Lane
from sparsebit.llm.walk.relay import Relay, start_of
from sparsebit.llm.walk.solve import set_weight, solve
from sparsebit.llm.walk.statistics import collect, sharing

TRIED = 4  # batches on which a change is measured


@torch.no_grad()
def sensitivities(
    source: InMemory, relay: Relay, job: Job, candidates: tuple[int, ...]
) -> Iterator[tuple[str, int, dict[int, float]]]:
    """(layer, its size, error by width); walks the float model once."""
    for t, captured in relay.towers(copies=True):
        start = start_of(source, source.layout.towers[t])
        for i in range(start, start + len(captured.calls)):
            calls = captured.calls[i - start]
            inputs = (captured.hidden, relay.fitted)
            yield from _of_block(source, i, calls, inputs, job, candidates)
            captured.passed(i - start)


def _of_block(
    source: InMemory,
    i: int,
    calls: list[Call],
    inputs: tuple[Any, int],
    job: Job,
    candidates: tuple[int, ...],
) -> Iterator[tuple[str, int, dict[int, float]]]:
    """Measures one block. Afterwards `hidden` is its output. Only the first batches are used for fitting."""
    hidden, fitted = inputs
    block = source.block(i)
    prefix = source.layout.prefix(i)
    linears = {n: m for n, m in linears_of(block).items() if prefix + n in job.specs}
    lane = Lane(block, calls[:fitted], hidden, linears)
    tried = range(min(TRIED, len(lane)))
    outputs = [lane.output(b) for b in tried]
    groups = sharing(lane.apart(), linears)
    statistics = collect(lane, groups)
    for name in (name for group in groups for name in group):  # in the order of running
        linear = linears[name]
        seen = statistics.get(name)
        errors = {}
        right = linear.weight
        for bits in candidates:
            spec = replace(job.specs[prefix + name], bits=bits)
            set_weight(linear, solve(linear, seen, spec, job, "")[0])
            errors[bits] = sum(_change(lane.output(b), outputs[b]) for b in tried)
            linear.weight = right
        lane.settle([name])
        yield prefix + name, right.numel(), errors
    for b in range(len(lane)):
        hidden[b] = outputs[b] if b in tried else lane.output(b, last=True)
    for b in range(fitted, len(calls)):
        hidden[b] = calls[b].run(block, hidden[b])


def _change(found: Tensor, expected: Tensor) -> float:
    change = (found - expected).float().square().sum(-1)
    return float((change / expected.float().square().sum(-1).clamp(min=1e-12)).mean())
