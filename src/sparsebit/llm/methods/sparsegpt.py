"""sparsegpt: zeros column by column; the remaining weights compensate them."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.llm.methods import ABOVE_ZERO, METHODS, N_OF_M, SHARE, Method
from sparsebit.numeric.solvers.gptq import Statistics, damped, target_of
from sparsebit.numeric.solvers.rtn import at_least_float
from sparsebit.numeric.solvers.sparsegpt import sparsegpt
from sparsebit.numeric.solvers.wanda import PrunedWeight, check_pattern, wanda
from sparsebit.numeric.spec import QuantSpec


def prune_and_mend(
    weight: Tensor,
    statistics: Statistics | None,
    spec: QuantSpec,
    *,
    ratio: float = 0.5,
    pattern: tuple[int, int] | None = None,
    damping: float = 0.01,
) -> PrunedWeight:
    """Zeros column by column; the remaining weights compensate them, and the errors of earlier layers."""
    check_pattern(ratio, pattern)
    if statistics is None:
        return wanda(weight, None, ratio, pattern)
    h = damped(statistics.hessian, damping, weight.shape[1])
    target = target_of(at_least_float(weight), statistics, h)
    mended, mask = sparsegpt(target, statistics.hessian, ratio, pattern, damping)
    return PrunedWeight(torch.where(mask, mended, 0.0).to(weight.dtype))


LIMITS = {"ratio": SHARE, "pattern": N_OF_M, "damping": ABOVE_ZERO}
METHODS.register("sparsegpt")(Method(prune_and_mend, needs_data=True, prunes=True, limits=LIMITS))
