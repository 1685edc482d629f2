"""SparseGPT: single weights are removed one column after the other, and the columns that follow compensate the error.

Frantar and Alistarh, SparseGPT, 2023. With H = X^T X of the layer's inputs and U the upper Cholesky factor of its
inverse, removing w_j costs w_j^2 / U_jj^2, and -w_j / U_jj * U_j,j+1: is added to the rest of the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.numeric.masks import keep_best, n_of_m

BLOCK = 128


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Upper U with U^T U = (H + damping * mean diag)^-1; inputs that are always zero do not matter."""
    h = hessian.double().clone()
    diagonal = h.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += damping * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    return torch.linalg.cholesky(inverse, upper=True)


def sparsegpt(
    weight: Tensor,
    hessian: Tensor,
    ratio: float,
    pattern: tuple[int, int] | None = None,
    damping: float = 0.01,
    period: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(weight, mask) of a matrix (outputs, inputs): `ratio` of every block of columns is removed, or all but n of m.

    period  groups of m start again after so many columns; columns that do not fill a group are kept.
    """
    w = weight.double().clone()
    u = inverse_factor(hessian, damping)
    mask = torch.ones_like(w, dtype=torch.bool)
    unit = 1 if pattern is None else period or pattern[1]
    block = -(-BLOCK // unit) * unit  # no group lies in two blocks
    for start in range(0, w.shape[1], block):
        stop = min(start + block, w.shape[1])
        errors = torch.zeros_like(w[:, start:stop])
        if pattern is None:
            cost = (w[:, start:stop] / u.diagonal()[start:stop]).square()
            mask[:, start:stop] = keep_best(cost, ratio)
        for j in range(start, stop):
            if pattern is not None and j % unit % pattern[1] == 0:
                group = slice(j, min(j + pattern[1], j - j % unit + unit, stop))
                mask[:, group] = n_of_m((w[:, group] / u.diagonal()[group]).square(), *pattern)
            error = torch.where(mask[:, j], 0.0, w[:, j]) / u[j, j]
            w[:, j + 1 : stop] -= error[:, None] * u[j, j + 1 : stop]
            w[:, j] = torch.where(mask[:, j], w[:, j], 0.0)
            errors[:, j - start] = error
        w[:, stop:] -= errors @ u[start:stop, stop:]
    return w.to(weight.dtype), mask
