"""Methods: how a layer gets its codes or its zeros. One file is one method, and adding a file adds the method.

A method is registered as a `Method`, or as a plain function, which becomes a `Method` with the usual needs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.solvers.gptq import Statistics
from sparsebit.numeric.solvers.wanda import PrunedWeight
from sparsebit.numeric.spec import QuantSpec
from sparsebit.registry import Registry

Solved = QuantizedWeight | PrunedWeight
Solver = Callable[..., Solved]
# the values that an option may have, and their description for errors
Limit = tuple[Callable[[Any], bool], str]
ABOVE_ZERO: Limit = (lambda value: value > 0, "must be above 0")
NOT_NEGATIVE: Limit = (lambda value: value >= 0, "must be 0 or more")
AT_LEAST_ONE: Limit = (lambda value: value >= 1, "must be 1 or more")
SHARE: Limit = (lambda value: 0 <= value < 1, "the share of weights to remove, must be in [0, 1)")
N_OF_M: Limit = (
    lambda value: value is None or (len(value) == 2 and 0 < value[0] < value[1]),
    "must be (n, m) with 0 < n < m, such as (2, 4)",
)
CLIP: Limit = (lambda value: value in ("minmax", "mse"), "must be 'minmax' or 'mse'")
NOT_OPTIONS = ("scale_dtype", "g_idx")  # keyword arguments that `llm.quantize` sets, not the user


@dataclass(eq=False)
class Method:
    """One method: the solver of a layer, and what the solver needs from the walk over the blocks.

    solve       (weight, statistics, spec, *, scale_dtype, ...) -> QuantizedWeight, or PrunedWeight where it prunes.
                Its other keyword-only arguments are the options of the method.
    needs_data  the work does not begin without calibration data.
    uses_data   statistics are collected where there is data; False: `statistics` is always None.
    twin        with match_float, the solver gets the outputs of the float model too.
    prunes      it makes zeros instead of codes: it takes no bits, no groups and no other format than "dense".
    activations it is for layers that round their inputs to 8 bits, which only its own `format` can say.
    scales      (weights, statistics, specs, tie, *, scale_dtype, ...) -> scales that are folded into the block
                before its layers are solved.
    limits      option -> Limit. Other values are refused before any work; the solver would refuse them later.
    bits, group_size, format   used where the caller of `llm.quantize` gives none.
    """

    solve: Solver
    needs_data: bool = False
    uses_data: bool = True
    twin: bool = True
    prunes: bool = False
    activations: bool = False
    scales: Callable[..., Tensor] | None = None
    limits: Mapping[str, Limit] = field(default_factory=dict)
    bits: int = 4
    group_size: int | None = None
    format: str = "compressed-tensors"

    def __post_init__(self) -> None:
        # the registry and `sparsebit list` read name, module and docstring
        functools.update_wrapper(self, self.solve)

    def __call__(
        self, weight: Tensor, statistics: Statistics | None, spec: QuantSpec, **options: Any
    ) -> Solved:
        """Solve one layer, with the options of `solve`."""
        return self.solve(weight, statistics, spec, **options)

    def run(
        self,
        weight: Tensor,
        statistics: Statistics | None,
        spec: QuantSpec,
        scale_dtype: torch.dtype,
        options: dict[str, Any],
    ) -> Solved:
        """Solve one layer. Those of `options` that belong to `scales` are left out."""
        chosen = options_of(self.solve, options)
        if _takes(self.solve, "scale_dtype"):
            chosen["scale_dtype"] = scale_dtype
        return self.solve(weight, statistics, spec, **chosen)

    def options(self) -> dict[str, Any]:
        """All options of the method with their defaults."""
        found = defaults_of(self.solve)
        if self.scales is not None:
            found.update(defaults_of(self.scales))
        return found

    def check(self, name: str, options: Mapping[str, Any]) -> None:
        """Refuse unknown options and impossible values before any work; the error lists the possible ones."""
        self._check_names(name, options)
        for option, value in options.items():
            if option in self.limits:
                is_possible, words = self.limits[option]
                if not is_possible(value):
                    raise ConfigError(f"{option}: {words}, got {value!r}")

    def _check_names(self, name: str, options: Iterable[str]) -> None:
        if _takes_everything(self.solve):
            return
        known = self.options()
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"{unknown[0]}: {name} has no such option; it has: {', '.join(known)}")


class Methods(Registry[Method]):
    """The registry of methods; a plain function becomes a Method."""

    def add(self, keys: Iterable[Hashable], item: Any, replace: bool = False) -> None:
        method = item if isinstance(item, Method) else Method(item)
        super().add(keys, method, replace)


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The options of a solver: its keyword-only arguments, with their defaults."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name not in NOT_OPTIONS:
            found[name] = parameter.default
    return found


def options_of(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The entries of `options` that `function` takes."""
    if _takes_everything(function):
        return dict(options)
    known = defaults_of(function)
    return {name: value for name, value in options.items() if name in known}


def _takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters or _takes_everything(function)


def _takes_everything(function: Callable[..., Any]) -> bool:
    """True if `function` has `**options`, so that its options are not known."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


METHODS = Methods("llm method")
METHODS.discover(__name__)
