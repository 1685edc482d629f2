"""GPTQ: columns are rounded one after the other, and those that follow compensate the error (Frantar et al., 2022).

With H = X^T X and U the upper Cholesky factor of its inverse, rounding w_j to q adds -(w_j - q) / U_jj * U_j,j+1: to
the rest of the row. `cross` moves the target to the float layer's output on float inputs (cf. GPTAQ, Li et al., 2025):
argmin_Q |X_f W^T - X Q^T| = argmin_Q |X (W* - Q)^T| with W* = W + W (X_f - X)^T X H^-1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.numeric.kernels import columns
from sparsebit.numeric.quantized_weight import QuantizedWeight, check, group_index, round_to
from sparsebit.numeric.solvers.refine import refine_grid
from sparsebit.numeric.solvers.rtn import at_least_float, fit_grid, fit_groups, on_grid, rtn
from sparsebit.numeric.spec import QuantSpec

BLOCK = 128


@dataclass(frozen=True)
class Statistics:
    """Sums over the inputs X (tokens, inputs) of a layer; the sums of batches can be added."""

    hessian: Tensor  # X^T X
    cross: Tensor | None = None  # (X_float - X)^T X, where the float model's inputs X_float differ
    tokens: int = 0
    # instead of `cross`, where outputs are fewer than inputs: Y^T X with Y = X_float W^T
    aim: Tensor | None = field(default=None, kw_only=True)

    def shift(self, w: Tensor) -> Tensor | None:
        """W (X_float - X)^T X, where that is known."""
        if self.aim is not None:
            return self.aim.to(w.dtype) - w @ self.hessian.to(w.dtype)
        if self.cross is None:
            return None
        return w @ self.cross.to(w.dtype)

    def factored(self, damping: float, act_order: bool, dtype: torch.dtype) -> Factored:
        """Layers that read one tensor share this object, and with it the work."""
        found: dict[tuple[Any, ...], Factored] = self.__dict__.setdefault("_factored", {})
        key = damping, act_order, dtype
        if key not in found:
            found[key] = _factor(damped(self.hessian, damping, len(self.hessian)), act_order, dtype)
        return found[key]


@dataclass(frozen=True)
class Factored:
    """H, damped; with its inputs in the order of the greedy pass H = R R^T and U = R^-1, both upper."""

    h: Tensor  # inputs in their own order
    order: Tensor
    lower: Tensor  # R with both axes reversed, which is a lower Cholesky factor
    u: Tensor

    def solve(self, right: Tensor) -> Tensor:
        """right H^-1, for `right` (rows, inputs)."""
        turned = self.order.flip(0)
        out = torch.empty_like(right)
        out[:, turned] = torch.cholesky_solve(right[:, turned].T, self.lower).T
        return out


def gptq(
    weight: Tensor,
    statistics: Statistics,
    spec: QuantSpec,
    *,
    damping: float = 0.01,
    act_order: bool = True,
    static_groups: bool = True,
    clip: str = "mse",
    refine: int = 1,
    scale_dtype: torch.dtype = torch.float16,
) -> QuantizedWeight:
    """`weight` on a grid, with the least error on the layer's outputs that a greedy pass finds.

    act_order      columns with the largest inputs first.
    static_groups  groups are runs of inputs with grids known in advance; else, with act_order, groups follow the
                   order of the columns, and `g_idx` holds the group of each input.
    refine         so many rounds of coordinate descent on the codes and least squares on the scales.

    Row by row never worse than rounding to nearest on the same kind of grid, in the damped error on the outputs.
    """
    check(weight, spec)
    check_hessian(statistics.hessian, weight.shape[1])
    w = at_least_float(weight)
    factored = statistics.factored(damping, act_order, w.dtype)
    shift = statistics.shift(w)
    if shift is not None:
        w = w + factored.solve(shift)
    h = factored.h
    order = factored.order
    static = None
    if static_groups or spec.group is None:
        static = fit_groups(w, h.diagonal().float(), spec, clip, scale_dtype)
    codes, scales, zeros, lost = _columns(w, factored, spec, static, clip, scale_dtype)
    g_idx = None
    if act_order and static is None:
        g_idx = torch.empty_like(order, dtype=torch.int32)
        g_idx[order] = group_index(w.shape[1], spec.group, w.device).int()
    found = QuantizedWeight(codes, scales, zeros, spec.bits, spec.symmetric, spec.group, g_idx)
    if static is not None:
        plain = on_grid(w, static, spec)
    else:
        plain = rtn(w, h.diagonal().float(), spec, clip=clip, scale_dtype=scale_dtype, g_idx=g_idx)
    found = better_rows(w, h, found, plain, lost)
    if refine:
        return refine_grid(w.float(), h.float(), found, refine)
    return found


def check_hessian(hessian: Tensor, inputs: int) -> None:
    if hessian.shape != (inputs, inputs):
        raise ConfigError(f"hessian: the weight has {inputs} inputs, its shape is {tuple(hessian.shape)}")


def damped(hessian: Tensor, damping: float, inputs: int) -> Tensor:
    """H + damping * mean(diag) in float64; inputs that are always zero do not matter."""
    check_hessian(hessian, inputs)
    if not damping > 0:
        raise ConfigError(f"damping: must be above 0, got {damping}")
    h = hessian.double().clone()
    diagonal = h.diagonal()
    if not bool(torch.isfinite(h).all()):
        raise ConfigError("hessian: NaN or Inf in the inputs of this layer; look at the calibration data")
    mean = float(diagonal.mean())
    diagonal += damping * mean if mean > 0 else 1.0
    return h


def target_of(w: Tensor, statistics: Statistics, h: Tensor) -> Tensor:
    """W*: the weight that fits the float layer's outputs best on the inputs that the quantized layer gets."""
    shift = statistics.shift(w.double())
    if shift is None:
        return w
    return (w.double() + torch.cholesky_solve(shift.T, torch.linalg.cholesky(h)).T).to(w.dtype)


def _factor(h: Tensor, act_order: bool, dtype: torch.dtype) -> Factored:
    """The factor U of H^-1. With H = R R^T, H^-1 = R^-T R^-1 = U^T U: one factorisation, of H turned around, instead of
    two.

    It is made in float64; U is as well conditioned as a root of H, so the rest may be `dtype`.
    """
    inputs = torch.arange(len(h), device=h.device)
    if act_order:
        order = h.diagonal().argsort(descending=True, stable=True)
    else:
        order = inputs
    turned = order.flip(0)
    lower = torch.linalg.cholesky(h[turned][:, turned]).to(dtype)
    return Factored(h.to(dtype), order, lower, _inverse(lower).flip(0, 1).contiguous())


def _inverse(lower: Tensor) -> Tensor:
    """The inverse of a lower triangle, by halves: nearly all of the work is products."""
    n = len(lower)
    if n <= BLOCK:
        one = torch.eye(n, dtype=lower.dtype, device=lower.device)
        return torch.linalg.solve_triangular(lower, one, upper=False)
    half = n // 2
    out = torch.zeros_like(lower)
    out[:half, :half] = _inverse(lower[:half, :half])
    out[half:, half:] = _inverse(lower[half:, half:])
    out[half:, :half] = -(out[half:, half:] @ lower[half:, :half]) @ out[:half, :half]
    return out


def _columns(
    w: Tensor,
    factored: Factored,
    spec: QuantSpec,
    static: tuple[Tensor, Tensor] | None,
    clip: str,
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, scales, zeros, error of each row): the greedy pass. Works on W^T: a column is one run of memory."""
    inputs = w.shape[1]
    group = spec.group or w.shape[1]
    order = factored.order
    u = factored.u
    wt = w.T[order].contiguous()
    codes = torch.empty(wt.shape, dtype=torch.uint8, device=w.device)
    index = group_index(inputs, spec.group, w.device)
    native = None
    if static is not None:
        index = index[order]
        scales, zeros = static
        native = columns.of(w, index, scales, zeros, spec.bits)
    else:
        shape = (w.shape[0], int(index[-1]) + 1)
        scales = torch.empty(shape, dtype=scale_dtype, device=w.device)
        zeros = torch.empty(shape, dtype=torch.uint8, device=w.device)
    importance = factored.h.diagonal()[order].float()
    at = index.tolist()
    # no new group lies in two blocks
    if static is None:
        block = max(BLOCK // group, 1) * group
    else:
        block = BLOCK
    lost = wt.new_zeros(wt.shape[1])
    for start in range(0, inputs, block):
        stop = min(start + block, inputs)
        errors = torch.empty_like(wt[start:stop])
        if native is not None:
            native.greedy(wt, errors, u, codes, order, start, stop)
        for j in range(start, stop) if native is None else ():
            if static is None and j % group == 0:
                part = slice(j, min(j + group, inputs))
                grid = fit_grid(wt[part].T.contiguous(), importance[part], spec, clip, scale_dtype)
                scales[:, at[j]], zeros[:, at[j]] = grid
            scale = scales[:, at[j]].float()
            zero = zeros[:, at[j]].float()
            code = round_to(wt[j], scale, zero, spec.bits)
            codes[order[j]] = code.to(torch.uint8)
            errors[j - start] = (wt[j] - (code - zero) * scale) / u[j, j]
            wt[j + 1 : stop].addr_(u[j, j + 1 : stop], errors[j - start], alpha=-1)
        wt[stop:].addmm_(u[start:stop, stop:].T, errors, alpha=-1)
        lost += errors.square().sum(0)  # with W - Q = E U, (W - Q) H (W - Q)^T = E E^T
    return codes.T.contiguous(), scales, zeros, lost


def output_error(w: Tensor, h: Tensor, q: QuantizedWeight) -> Tensor:
    """(rows,): (w - q) H (w - q)^T of each row, the squared error of its outputs over the calibration tokens."""
    gap = w - q.dequantize(w.dtype)
    return ((gap @ h.to(w.dtype)) * gap).sum(1)


def better_rows(
    w: Tensor, h: Tensor, a: QuantizedWeight, b: QuantizedWeight, lost: Tensor
) -> QuantizedWeight:
    """The better row of two solutions with one grouping, for each row; `lost` is the error of the first."""
    take = (output_error(w, h, b) < lost)[:, None]
    return replace(
        a,
        codes=torch.where(take, b.codes, a.codes),
        scales=torch.where(take, b.scales, a.scales),
        zeros=torch.where(take, b.zeros, a.zeros),
    )
