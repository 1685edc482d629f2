"""Round to nearest: a grid per row or group from the range of the weights, or from the range that loses least.

The second tries shrunken ranges and keeps, per group, the one with the least squared error. With the second moments of
the inputs as importance, that is the error of the layer's output, if the inputs are uncorrelated.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.numeric.kernels import columns
from sparsebit.numeric.quantized_weight import QuantizedWeight, check, group_index, round_to
from sparsebit.numeric.spec import QuantSpec

SHRINK = torch.linspace(1.0, 0.3, 57)  # shares of the full range that the mse clip tries
SIGNED = 4  # bits up to which symmetric grids may have negative scales
PIECE = 2**14  # groups whose grids are tried together


def rtn(
    weight: Tensor,
    importance: Tensor | None,
    spec: QuantSpec,
    *,
    clip: str = "mse",
    scale_dtype: torch.dtype = torch.float16,
    g_idx: Tensor | None = None,
) -> QuantizedWeight:
    """`weight` on its nearest grid values; importance (inputs,) or None weighs the errors that `clip="mse"` adds up."""
    check(weight, spec)
    w = at_least_float(weight)
    return on_grid(w, fit_groups(w, importance, spec, clip, scale_dtype, g_idx), spec, g_idx)


def on_grid(
    w: Tensor, grid: tuple[Tensor, Tensor], spec: QuantSpec, g_idx: Tensor | None = None
) -> QuantizedWeight:
    """`w` on the nearest values of a grid that is known: (scales, zeros), both (rows, groups)."""
    scales, zeros = grid
    if g_idx is None:
        index = group_index(w.shape[1], spec.group, w.device)
    else:
        index = g_idx.long()
    codes = round_to(w, scales.float()[:, index], zeros.float()[:, index], spec.bits)
    return QuantizedWeight(codes.to(torch.uint8), scales, zeros, spec.bits, spec.symmetric, spec.group, g_idx)


def at_least_float(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


def fit_groups(
    w: Tensor,
    importance: Tensor | None,
    spec: QuantSpec,
    clip: str,
    scale_dtype: torch.dtype,
    g_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(scales, zeros) of shape (rows, groups) for a whole matrix."""
    if importance is None:
        importance = torch.ones(w.shape[1], device=w.device)
    if g_idx is not None:  # members of a group side by side; all groups but the last are full
        order = g_idx.argsort(stable=True)
        w = w[:, order]
        importance = importance[order]
    group = min(spec.group or w.shape[1], w.shape[1])
    pad = -w.shape[1] % group  # zeros change no range, and weigh nothing
    grouped = F.pad(w, (0, pad)).unflatten(1, (-1, group))
    weights = F.pad(importance.float(), (0, pad)).unflatten(0, (-1, group))
    return fit_grid(grouped, weights, spec, clip, scale_dtype)


def fit_grid(
    w: Tensor, importance: Tensor, spec: QuantSpec, clip: str, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(scales, zeros) over the last axis of `w`; the scales are already what `scale_dtype` can hold."""
    if clip not in ("minmax", "mse"):
        raise ConfigError(f"clip: must be 'minmax' or 'mse', got {clip!r}")
    low = w.amin(-1).clamp(max=0)
    high = w.amax(-1).clamp(min=0)
    if spec.symmetric:
        high = torch.maximum(-low, high)
        low = -high
    if clip == "minmax":
        scale, zero = grid_of(low, high, spec, scale_dtype)
        return scale.to(scale_dtype), zero.to(torch.uint8)
    lib = columns.library_for(w)
    if lib is not None:
        found = []
        step = max(PIECE // low[:1].numel(), 1)
        for part, bottom, top in zip(w.split(step), low.split(step), high.split(step)):
            grids = _tries(bottom, top, spec, scale_dtype)
            found.append(columns.least(lib, part, importance, *grids, spec.bits))
        scales, zeros = (torch.cat(parts) for parts in zip(*found))
        return scales.to(scale_dtype), zeros.to(torch.uint8)
    tries = zip(*_tries(low, high, spec, scale_dtype))
    best = next(tries)
    least = _error(w, importance, *best, spec.bits)
    for grid in tries:
        error = _error(w, importance, *grid, spec.bits)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, grid[0], best[0]), torch.where(better, grid[1], best[1])
    return best[0].to(scale_dtype), best[1].to(torch.uint8)


def _tries(low: Tensor, high: Tensor, spec: QuantSpec, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The grids among which the mse clip chooses, along a new first axis.

    With few levels the best grid need not lie in the range of the weights: those of symmetric grids are tried as well,
    with the odd level below 0 and above. So zero points never lose against symmetric grids.
    """
    shares = SHRINK.to(low.device).view(-1, *[1] * low.dim())
    scale, zero = grid_of(low * shares, high * shares, spec, scale_dtype)
    if spec.symmetric or spec.bits > SIGNED:
        signs = signs_of(spec)
        return torch.cat([scale * sign for sign in signs]), torch.cat([zero] * len(signs))
    peak = torch.maximum(-low, high) * shares
    even, middle = grid_of(-peak, peak, replace(spec, symmetric=True), scale_dtype)
    return torch.cat([scale, even, even]), torch.cat([zero, middle, middle - 1])


def signs_of(spec: QuantSpec) -> tuple[int, ...]:
    """The sign of each scale of a grid.

    A symmetric grid has one level more below 0 than above. With a negative scale that level is above 0, where a group
    may need it. At 2 bits it is one of four levels; at 8 bits it makes no difference. Readers multiply as usual.
    """
    if spec.symmetric and spec.bits <= SIGNED:
        return (1, -1)
    return (1,)


def grid_of(low: Tensor, high: Tensor, spec: QuantSpec, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Float scale and zero of a range around 0; a range of nothing gets scale 1, where every weight is exactly 0."""
    top = 2**spec.bits - 1
    scale = (high - low) / top
    scale = torch.where(scale > 0, storable(scale, scale_dtype), 1.0)
    if spec.symmetric:
        return scale, torch.full_like(scale, 2 ** (spec.bits - 1))
    return scale, (-low / scale).round().clamp(0, top)


def storable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to what `dtype` holds, and neither 0 nor Inf there."""
    limits = torch.finfo(dtype)
    size = scale.abs().clamp(limits.smallest_normal, limits.max)
    return torch.copysign(size, scale).to(dtype).float()


def _error(w: Tensor, importance: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    scale = scale[..., None]
    zero = zero[..., None]
    back = round_to(w, scale, zero, bits).sub_(zero).mul_(scale)
    return back.sub_(w).square_().mul_(importance).sum(-1)
