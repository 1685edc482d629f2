"""Polish a quantized matrix: every code to its best value with all others fixed, every scale by least squares.

Both steps lower (w - q) H (w - q)^T or leave it; coordinate descent on codes as in QuantEase (Behdin et al., 2023).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.numeric.kernels import columns
from sparsebit.numeric.quantized_weight import QuantizedWeight, round_to
from sparsebit.numeric.solvers.rtn import storable

BLOCK = 128


def refine_grid(w: Tensor, h: Tensor, q: QuantizedWeight, rounds: int) -> QuantizedWeight:
    """Run `rounds` rounds of both steps; w (outputs, inputs) and h are float32, h is positive definite."""
    for _ in range(rounds):
        q = replace(q, scales=best_scales(w, h, q))
        q = replace(q, codes=best_codes(w, h, q))
    return q


def best_codes(w: Tensor, h: Tensor, q: QuantizedWeight) -> Tensor:
    """One sweep over the columns: each moves to the grid value next to its optimum, given the others."""
    index = q.groups.tolist()
    scales = q.scales.float().T.contiguous()
    zeros = q.zeros.float().T.contiguous()
    codes = q.codes.T.float().contiguous()
    gap = (w - q.dequantize()).T.contiguous()  # (inputs, outputs): a column is one run of memory
    native = columns.of(w, q.groups, q.scales, q.zeros, q.bits)
    for start in range(0, w.shape[1], BLOCK):
        stop = min(start + BLOCK, w.shape[1])
        pull = h[start:stop] @ gap
        if native is not None:
            native.descend(pull, gap, codes, h, start, stop)
            continue
        for j in range(start, stop):
            scale = scales[index[j]]
            zero = zeros[index[j]]
            ideal = (codes[j] - zero) * scale + pull[j - start] / h[j, j]
            new = round_to(ideal, scale, zero, q.bits)
            step = (new - codes[j]) * scale
            codes[j] = new
            gap[j] -= step
            pull.addr_(h[start:stop, j], step, alpha=-1)
    return codes.T.contiguous().to(torch.uint8)


def _sums(x: Tensor, size: int) -> Tensor:
    """The sums of runs of `size` values; the last run may be shorter."""
    return F.pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size)).sum(-1)


def best_scales(w: Tensor, h: Tensor, q: QuantizedWeight) -> Tensor:
    """Least squares for the scales of each row with its codes fixed; a row that would not gain keeps its own."""
    index = q.groups
    n = q.scales.shape[1]
    levels = q.codes.float() - q.zeros.float()[:, index]
    right = (w @ h).mul_(levels)
    if q.g_idx is not None:  # members of a group side by side
        order = index.argsort(stable=True)
        levels = levels[:, order]
        right = right[:, order]
        h = h[order][:, order]
    size = min(q.group or w.shape[1], w.shape[1])  # of all groups but the last
    system = torch.empty(w.shape[0], n, n, device=w.device)
    for g in range(n):
        start = g * size
        stop = min((g + 1) * size, w.shape[1])
        product = (levels[:, start:stop] @ h[start:stop, start:]).mul_(levels[:, start:])
        system[:, g, g:] = system[:, g:, g] = _sums(product, size)
    right = _sums(right, size)
    ridge = 1e-6 * system.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-30)
    old = q.scales.float()
    eye = torch.eye(n, device=w.device)
    moved = torch.linalg.solve(
        (system + ridge[:, None, None] * eye).double(), (right + ridge[:, None] * old).double()[..., None]
    )[..., 0].float()
    ratio = moved / old
    usable = torch.isfinite(moved) & (ratio > 0.25) & (ratio < 4)  # others: groups that say nothing
    new = torch.where(usable, storable(moved, q.scales.dtype), old)

    def cost(s: Tensor) -> Tensor:  # the error less its constant part
        s = s.double()
        return (s * (system.double() @ s[..., None])[..., 0]).sum(1) - 2 * (s * right.double()).sum(1)

    return torch.where((cost(new) < cost(old))[:, None], new, old).to(q.scales.dtype)
