"""GPTQ: columns are rounded one after the other, and those that follow make up for the error (Frantar et al., 2022).

With H = X^T X and U the upper Cholesky factor of its inverse, rounding w_j to q adds -(w_j - q) / U_jj * U_j,j+1: to
the rest of the row. `cross` moves the target to the float layer's output on float inputs (cf. GPTAQ, Li et al., 2025):
argmin_Q |X_f W^T - X Q^T| = argmin_Q |X (W* - Q)^T| with W* = W + W (X_f - X)^T X H^-1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.numeric.quantized_weight import QuantizedWeight, check, group_index, round_to
from sparsebit.numeric.refine import refine_grid
from sparsebit.numeric.rtn import at_least_float, fit_grid, fit_groups, on_grid, rtn
from sparsebit.numeric.spec import QuantSpec

BLOCK = 128


@dataclass(frozen=True)
class Statistics:
    """What a layer's inputs X (tokens, inputs) leave behind: sums, so that batches add up."""

    hessian: Tensor  # X^T X
    cross: Tensor | None = None  # (X_float - X)^T X, where the float model's inputs X_float differ
    tokens: int = 0


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
                   order of the columns, and `g_idx` says which input is in which.
    refine         so many rounds of coordinate descent on the codes and least squares on the scales.

    Row by row never worse than rounding to nearest on the same kind of grid, in the damped error on the outputs.
    """
    check(weight, spec)
    h = damped(statistics.hessian, damping, weight.shape[1])
    w = target_of(at_least_float(weight), statistics, h)
    order = h.diagonal().argsort(descending=True, stable=True) if act_order else None
    static = None
    if static_groups or spec.group is None:
        static = fit_groups(w, h.diagonal().float(), spec, clip, scale_dtype)
    codes, scales, zeros = _columns(w, h, spec, order, static, clip, scale_dtype)
    g_idx = None
    if order is not None and static is None:
        g_idx = torch.empty_like(order, dtype=torch.int32)
        g_idx[order] = group_index(w.shape[1], spec.group, w.device).int()
    found = QuantizedWeight(codes, scales, zeros, spec.bits, spec.symmetric, spec.group, g_idx)
    if static is not None:
        plain = on_grid(w, static, spec)
    else:
        plain = rtn(w, h.diagonal().float(), spec, clip=clip, scale_dtype=scale_dtype, g_idx=g_idx)
    found = better_rows(w, h, found, plain)
    return refine_grid(w.float(), h.float(), found, refine) if refine else found


def damped(hessian: Tensor, damping: float, inputs: int) -> Tensor:
    """H + damping * mean(diag) in float64; inputs that are always zero do not matter."""
    if hessian.shape != (inputs, inputs):
        raise ConfigError(f"hessian: the weight has {inputs} inputs, its shape is {tuple(hessian.shape)}")
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
    if statistics.cross is None:
        return w
    moved = torch.cholesky_solve((w.double() @ statistics.cross.double()).T, torch.linalg.cholesky(h)).T
    return (w.double() + moved).to(w.dtype)


def _columns(
    w: Tensor,
    h: Tensor,
    spec: QuantSpec,
    order: Tensor | None,
    static: tuple[Tensor, Tensor] | None,
    clip: str,
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, zeros): the greedy pass. Works on W^T, so that a column is one run of memory."""
    inputs, group = w.shape[1], spec.group or w.shape[1]
    order = torch.arange(inputs, device=w.device) if order is None else order
    u = _inverse_factor(h[order][:, order]).to(w.dtype)
    wt, codes = w.T[order].contiguous(), torch.empty_like(w.T, dtype=torch.uint8)
    index = group_index(inputs, spec.group, w.device)
    if static is not None:
        index = index[order]
        scales, zeros = static
    else:
        shape = (w.shape[0], int(index[-1]) + 1)
        scales = torch.empty(shape, dtype=scale_dtype, device=w.device)
        zeros = torch.empty(shape, dtype=torch.uint8, device=w.device)
    importance, at = h.diagonal()[order].float(), index.tolist()
    block = max(BLOCK // group, 1) * group if static is None else BLOCK  # no new group lies in two blocks
    for start in range(0, inputs, block):
        stop = min(start + block, inputs)
        errors = torch.empty_like(wt[start:stop])
        for j in range(start, stop):
            if static is None and j % group == 0:
                part = slice(j, min(j + group, inputs))
                grid = fit_grid(wt[part].T.contiguous(), importance[part], spec, clip, scale_dtype)
                scales[:, at[j]], zeros[:, at[j]] = grid
            scale, zero = scales[:, at[j]].float(), zeros[:, at[j]].float()
            code = round_to(wt[j], scale, zero, spec.bits)
            codes[order[j]] = code.to(torch.uint8)
            errors[j - start] = (wt[j] - (code - zero) * scale) / u[j, j]
            wt[j + 1 : stop].addr_(u[j, j + 1 : stop], errors[j - start], alpha=-1)
        wt[stop:].addmm_(u[start:stop, stop:].T, errors, alpha=-1)
    return codes.T.contiguous(), scales, zeros


def _inverse_factor(h: Tensor) -> Tensor:
    """Upper U with U^T U = h^-1."""
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)


def output_error(w: Tensor, h: Tensor, q: QuantizedWeight) -> Tensor:
    """(rows,): (w - q) H (w - q)^T of each row, the squared error of its outputs over the calibration tokens."""
    gap = w.double() - q.dequantize(torch.float64)
    return ((gap @ h.double()) * gap).sum(1)


def better_rows(w: Tensor, h: Tensor, a: QuantizedWeight, b: QuantizedWeight) -> QuantizedWeight:
    """Of two solutions with one grouping, the better one for each row."""
    take = (output_error(w, h, b) < output_error(w, h, a))[:, None]
    return replace(
        a,
        codes=torch.where(take, b.codes, a.codes),
        scales=torch.where(take, b.scales, a.scales),
        zeros=torch.where(take, b.zeros, a.zeros),
    )
