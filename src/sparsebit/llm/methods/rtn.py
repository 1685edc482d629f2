"""rtn: every weight is rounded to the nearest value of its grid. It needs no data."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.llm.methods import CLIP, METHODS, Method
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.solvers.gptq import Statistics
from sparsebit.numeric.solvers.rtn import rtn
from sparsebit.numeric.spec import QuantSpec


def round_to_nearest(
    weight: Tensor,
    statistics: Statistics | None,
    spec: QuantSpec,
    *,
    clip: str = "mse",
    scale_dtype: torch.dtype = torch.float16,
) -> QuantizedWeight:
    """Round to nearest; `clip="mse"` weighs all inputs alike, because no data is read."""
    return rtn(weight, None, spec, clip=clip, scale_dtype=scale_dtype)


METHODS.register("rtn")(Method(round_to_nearest, uses_data=False, limits={"clip": CLIP}))
