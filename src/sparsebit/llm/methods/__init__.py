"""Solvers by name: (weight, statistics, spec) -> QuantizedWeight. A new method is one registered function.

What a method wants of the walk is said by the sets below; a method of a user's own gets statistics with a float twin.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.solvers.awq import awq, awq_scales
from sparsebit.numeric.solvers.gptq import Statistics, damped, gptq, target_of
from sparsebit.numeric.solvers.hqq import hqq
from sparsebit.numeric.solvers.rtn import at_least_float, rtn
from sparsebit.numeric.solvers.smoothquant import smooth_scales, smoothquant
from sparsebit.numeric.solvers.sparsegpt import sparsegpt
from sparsebit.numeric.solvers.wanda import PrunedWeight, check_pattern, wanda
from sparsebit.numeric.spec import QuantSpec
from sparsebit.registry import Registry

Solved = QuantizedWeight | PrunedWeight
Solver = Callable[..., Solved]
METHODS: Registry[Solver] = Registry("llm method")
METHODS.register("gptq")(gptq)
METHODS.register("awq")(awq)
METHODS.register("hqq")(hqq)
METHODS.register("smoothquant")(smoothquant)


@METHODS.register("rtn")
def round_to_nearest(
    weight: Tensor, statistics: Statistics | None, spec: QuantSpec, **options: Any
) -> QuantizedWeight:
    """Looks at no data; `clip="mse"` weighs all inputs alike."""
    return rtn(weight, None, spec, **options)


@METHODS.register("wanda")
def prune_by_inputs(
    weight: Tensor,
    statistics: Statistics | None,
    spec: QuantSpec,
    *,
    ratio: float = 0.5,
    pattern: tuple[int, int] | None = None,
    scale_dtype: torch.dtype | None = None,
) -> PrunedWeight:
    """Zeros by |w| times the size of the input; `spec` says nothing to it."""
    return wanda(weight, None if statistics is None else statistics.hessian, ratio, pattern)


@METHODS.register("sparsegpt")
def prune_and_mend(
    weight: Tensor,
    statistics: Statistics | None,
    spec: QuantSpec,
    *,
    ratio: float = 0.5,
    pattern: tuple[int, int] | None = None,
    damping: float = 0.01,
    scale_dtype: torch.dtype | None = None,
) -> PrunedWeight:
    """Zeros column by column; what is left makes up for them, and for errors of earlier layers."""
    check_pattern(ratio, pattern)
    if statistics is None:
        return wanda(weight, None, ratio, pattern)
    h = damped(statistics.hessian, damping, weight.shape[1])
    target = target_of(at_least_float(weight), statistics, h)
    mended, mask = sparsegpt(target, statistics.hessian, ratio, pattern, damping)
    return PrunedWeight(torch.where(mask, mended, 0.0).to(weight.dtype))


NEEDS_DATA = {"gptq", "awq", "smoothquant", "wanda", "sparsegpt"}  # refuse to start without batches
IGNORES_DATA = {"rtn", "hqq"}  # statistics are not collected for these
NO_TWIN = {"awq", "smoothquant", "wanda"}  # do not ask what the float model would have given
PRUNES = {"wanda", "sparsegpt"}  # zeros instead of codes
SCALES: dict[str, Callable[..., Tensor]] = {
    "awq": awq_scales,
    "smoothquant": smooth_scales,
}  # scales that are folded into the block before its layers are solved


def check_options(method: str, options: dict[str, Any]) -> None:
    """Unknown options are refused before any work, with what there is."""
    solver = rtn if METHODS[method] is round_to_nearest else METHODS[method]
    known = list(dict.fromkeys([*keywords(solver), *(keywords(SCALES[method]) if method in SCALES else ())]))
    wrong = sorted(set(options) - set(known))
    if wrong:
        raise ConfigError(f"{wrong[0]}: {method} has no such option; it has: {', '.join(known)}")


def keywords(function: Callable[..., Any]) -> list[str]:
    """The options of a solver."""
    return [
        name for name, p in inspect.signature(function).parameters.items()
        if p.kind is p.KEYWORD_ONLY and name not in ("scale_dtype", "g_idx")
    ]  # fmt: skip


def options_of(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Those of `options` that `function` takes."""
    known = keywords(function)
    return {k: v for k, v in options.items() if k in known}
