"""One layer: its codes or zeros, and its entry in the report."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sparsebit.errors import SparsebitError
from sparsebit.llm.methods import Solved
from sparsebit.llm.walk.job import Job
from sparsebit.numeric.solvers.gptq import Statistics
from sparsebit.numeric.solvers.rtn import at_least_float, rtn
from sparsebit.numeric.solvers.wanda import PrunedWeight
from sparsebit.numeric.spec import QuantSpec


def solve(
    linear: nn.Linear, statistics: Statistics | None, spec: QuantSpec, job: Job, name: str
) -> tuple[Solved, dict[str, Any]]:
    """The solved weight of a layer, and its facts.

    A layer that no token reached (an expert that the router never chose) is rounded to nearest, or pruned by size.
    """
    facts: dict[str, Any] = {"bits": spec.bits}
    unreached = statistics is None and job.method.needs_data
    if unreached:
        instead = "rounded to nearest"
        if job.method.prunes:
            instead = "pruned by size"
        facts["note"] = f"no calibration token reached this layer: {instead}"
    solved: Solved
    try:
        if unreached and not job.method.prunes:
            solved = rtn(linear.weight, None, spec, scale_dtype=job.scale_dtype)
        else:
            solved = job.method.run(linear.weight, statistics, spec, job.scale_dtype, job.options)
    except SparsebitError as error:
        raise type(error)(f"{name}: {error}") from error
    if isinstance(solved, PrunedWeight):
        facts["bits"] = solved.bits
        facts["sparsity"] = round(solved.sparsity, 4)
    facts["stored_bits"] = round(solved.stored_bits(), 4)
    size = linear.weight.numel()
    before = size * linear.weight.element_size()
    after = round(size * solved.stored_bits() / 8)
    facts["bytes"] = [before, after]
    if statistics is not None:
        facts["error"] = float(f"{_share_lost(linear.weight, statistics.hessian, solved):.4g}")
    return solved, facts


def _share_lost(weight: Tensor, hessian: Tensor, solved: Solved) -> float:
    """Squared error of the outputs, as a share of the squared outputs."""
    w = at_least_float(weight)
    gap = w - solved.dequantize(w.dtype)
    h = hessian.to(w.dtype)
    lost = ((gap @ h) * gap).sum()
    signal = ((w @ h) * w).sum()
    return float(lost / signal.clamp(min=1e-30))


def set_weight(linear: nn.Linear, solved: Solved) -> None:
    """The layer computes with the rounded or pruned weight from now on."""
    weight = solved.dequantize(linear.weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
