"""Solvers by name: (weight, statistics, spec) -> QuantizedWeight. A new method is one registered function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.numeric.gptq import Statistics, gptq
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.rtn import rtn
from sparsebit.numeric.spec import QuantSpec
from sparsebit.registry import Registry

Solver = Callable[..., QuantizedWeight]
METHODS: Registry[Solver] = Registry("llm method")
METHODS.register("gptq")(gptq)


@METHODS.register("rtn")
def round_to_nearest(
    weight: Tensor, statistics: Statistics | None, spec: QuantSpec, **options: Any
) -> QuantizedWeight:
    """Looks at no data; `clip="mse"` weighs all inputs alike."""
    return rtn(weight, None, spec, **options)


NEEDS_DATA = {"gptq"}  # refuse to start without batches
IGNORES_DATA = {"rtn"}  # statistics are not collected for these


def check_options(method: str, options: dict[str, Any]) -> None:
    """Unknown options are refused before any work, with what there is."""
    solver = rtn if METHODS[method] is round_to_nearest else METHODS[method]
    known = [
        name for name, p in inspect.signature(solver).parameters.items()
        if p.kind is p.KEYWORD_ONLY and name not in ("scale_dtype", "g_idx")
    ]  # fmt: skip
    wrong = sorted(set(options) - set(known))
    if wrong:
        raise ConfigError(f"{wrong[0]}: {method} has no such option; it has: {', '.join(known)}")
