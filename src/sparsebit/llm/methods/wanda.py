"""wanda: the weights with the smallest |weight| times size of the input become zeros."""

from __future__ import annotations

from torch import Tensor

from sparsebit.llm.methods import METHODS, N_OF_M, SHARE, Method
from sparsebit.numeric.solvers.gptq import Statistics
from sparsebit.numeric.solvers.wanda import PrunedWeight, wanda
from sparsebit.numeric.spec import QuantSpec


def prune_by_inputs(
    weight: Tensor,
    statistics: Statistics | None,
    spec: QuantSpec,
    *,
    ratio: float = 0.5,
    pattern: tuple[int, int] | None = None,
) -> PrunedWeight:
    """Zeros by |weight| times the size of the input; by |weight| alone where no input was seen."""
    hessian = None if statistics is None else statistics.hessian
    return wanda(weight, hessian, ratio, pattern)


LIMITS = {"ratio": SHARE, "pattern": N_OF_M}
METHODS.register("wanda")(Method(prune_by_inputs, needs_data=True, twin=False, prunes=True, limits=LIMITS))
