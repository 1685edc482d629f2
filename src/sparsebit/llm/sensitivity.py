"""What each layer would cost at each width: the change of its block's output when that layer alone is quantized.

Squared error over squared output, token by token, because the norm that follows divides by the token's size (and a
few tokens are a thousand times larger than the others).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.llm.blocks import linears_of
from sparsebit.llm.capture import Call, Captured
from sparsebit.llm.sources import InMemory
from sparsebit.llm.statistics import collect, sharing
from sparsebit.llm.walk import Job, copied, set_weight, solve
from sparsebit.numeric.spec import QuantSpec

TRIED = 4  # batches on which a change is measured


@torch.no_grad()
def sensitivities(
    source: InMemory, captured: Captured, job: Job, candidates: tuple[int, ...]
) -> Iterator[tuple[str, int, dict[int, float]]]:
    """(layer, its size, error by width); walks the float model once."""
    hidden = copied(captured.hidden)
    for i in range(len(source.layout)):
        block, prefix, calls = source.block(i), source.layout.prefix(i), captured.calls[i]
        outputs = [call.run(block, h) for call, h in zip(calls, hidden[:TRIED])]
        linears = {n: m for n, m in linears_of(block).items() if prefix + n in job.specs}
        statistics = collect(block, sharing(block, linears, calls[0], hidden[0]), calls, hidden)
        for name, linear in linears.items():
            errors = {}
            for bits in candidates:
                spec = replace(job.specs[prefix + name], bits=bits)
                errors[bits] = _damage(block, linear, statistics.get(name), spec, job, calls, hidden, outputs)
            yield prefix + name, linear.weight.numel(), errors
        for b, call in enumerate(calls):
            hidden[b] = outputs[b] if b < TRIED else call.run(block, hidden[b])


def _damage(
    block: nn.Module,
    linear: nn.Linear,
    statistics: Any,
    spec: QuantSpec,
    job: Job,
    calls: list[Call],
    hidden: Any,
    outputs: list[Tensor],
) -> float:
    right = linear.weight
    set_weight(linear, solve(linear, statistics, spec, job, "")[0])
    total = 0.0
    for call, h, expected in zip(calls, hidden, outputs):
        change = (call.run(block, h) - expected).float().square().sum(-1)
        total += float((change / expected.float().square().sum(-1).clamp(min=1e-12)).mean())
    linear.weight = right
    return total
