"""HQQ: grids that fit most weights well and let a few miss, without data (Badri and Shaji, 2023).

min sum |w - (code - zero) scale|^p with p < 1, split in two (half-quadratic): the few large misses e come from the
shrinkage of the residual, then zero and scale are the least squares fit of the codes to w - e.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.numeric.quantized_weight import QuantizedWeight, check, group_index, round_to
from sparsebit.numeric.solvers.rtn import at_least_float, fit_grid, signs_of, storable
from sparsebit.numeric.spec import QuantSpec

# of the paper: how closely e follows the residual, in units of a step
BETA = 10.0
GROWTH = 1.01


def hqq(
    weight: Tensor,
    statistics: None,
    spec: QuantSpec,
    *,
    p: float = 0.7,
    rounds: int = 20,
    scale_dtype: torch.dtype = torch.float16,
) -> QuantizedWeight:
    """Group by group never worse than the min-max grid in sum |w - q|^p; `statistics` are not looked at."""
    check(weight, spec)
    if not 0 < p <= 2 or rounds < 0:
        raise ConfigError(f"p, rounds: must be in (0, 2] and at least 0, got {p} and {rounds}")
    w = at_least_float(weight)
    group = min(spec.group or w.shape[1], w.shape[1])
    pad = -w.shape[1] % group
    grouped = F.pad(w, (0, pad)).unflatten(1, (-1, group))
    real = F.pad(torch.ones(w.shape[1], device=w.device), (0, pad)).unflatten(0, (-1, group))
    scales, zeros = _fit(grouped, real, spec, p, rounds, scale_dtype)
    index = group_index(w.shape[1], spec.group, w.device)
    codes = round_to(w, scales[:, index], zeros[:, index], spec.bits).to(torch.uint8)
    return QuantizedWeight(
        codes, scales.to(scale_dtype), zeros.to(torch.uint8), spec.bits, spec.symmetric, spec.group
    )


def _fit(
    w: Tensor, real: Tensor, spec: QuantSpec, p: float, rounds: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scales and zeros (rows, groups) of w (rows, groups, group); `real` is 0 where a group is filled up."""
    begin = [part.float()[..., None] for part in fit_grid(w, real, spec, "minmax", scale_dtype)]
    best = (begin[0], begin[1])
    least = torch.full_like(begin[0], float("inf"))
    for sign in signs_of(spec):  # a sign is not changed
        scale = begin[0] * sign
        zero = begin[1]
        for i in range(rounds + 1):
            codes = round_to(w, scale, zero, spec.bits)
            gap = w - (codes - zero) * scale
            cost = (gap.abs() ** p * real).sum(-1, keepdim=True)
            better = cost < least
            least = torch.where(better, cost, least)
            best = torch.where(better, scale, best[0]), torch.where(better, zero, best[1])
            target = w - shrink(gap / scale, BETA * GROWTH**i, p) * scale
            scale, zero = _least_squares(codes, target, (scale, zero), real, spec, scale_dtype)
    return best[0][..., 0], best[1][..., 0]


def _least_squares(
    codes: Tensor,
    target: Tensor,
    grid: tuple[Tensor, Tensor],
    real: Tensor,
    spec: QuantSpec,
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The zero, then the scale, that bring fixed codes closest to the target; `grid` is the one before."""
    scale, zero = grid
    if not spec.symmetric:
        shift = ((codes - target / scale) * real).sum(-1, keepdim=True) / real.sum(-1, keepdim=True)
        zero = shift.round().clamp(0, 2**spec.bits - 1)
    levels = (codes - zero) * real
    fitted = (levels * target).sum(-1, keepdim=True) / levels.square().sum(-1, keepdim=True)
    usable = torch.isfinite(fitted) & (fitted * scale > 0)
    return torch.where(usable, storable(fitted.nan_to_num(1.0, 1.0, 1.0), scale_dtype), scale), zero


def shrink(x: Tensor, beta: float, p: float) -> Tensor:
    """Generalised soft threshold: small residuals become 0, large ones stay."""
    size = x.abs()
    return x.sign() * (size - size.clamp(min=1e-8) ** (p - 1) / beta).clamp(min=0)
