"""Wanda: single weights go by |w| times the size of their input, row by row (Sun et al., 2023); nothing else moves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.numeric.masks import keep_best, n_of_m


@dataclass(frozen=True)
class PrunedWeight:
    """The result of a pruning solver for a matrix (outputs, inputs): the dense weight, with zeros."""

    weight: Tensor

    @property
    def bits(self) -> int:
        return self.weight.element_size() * 8

    @property
    def sparsity(self) -> float:
        return float((self.weight == 0).float().mean())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.weight.to(dtype)

    def stored_bits(self) -> float:
        return float(self.bits)


def wanda(
    weight: Tensor, hessian: Tensor | None, ratio: float, pattern: tuple[int, int] | None = None
) -> PrunedWeight:
    """`ratio` of every row is removed, or all but n of every m inputs; without a Hessian by magnitude alone."""
    check_pattern(ratio, pattern)
    worth = weight.detach().float().abs()
    if hessian is not None:
        worth = worth * hessian.diagonal().clamp(min=0).sqrt().float()
    if pattern is None:
        mask = keep_best(worth, ratio, per_row=True)
    else:
        mask = n_of_m(worth, *pattern)
    return PrunedWeight(torch.where(mask, weight.detach(), 0.0).to(weight.dtype))


def check_pattern(ratio: float, pattern: tuple[int, int] | None) -> None:
    if pattern is not None and not (len(pattern) == 2 and 0 < pattern[0] < pattern[1]):
        raise ConfigError(f"pattern: must be (n, m) with 0 < n < m, such as (2, 4), got {pattern}")
    if pattern is None and not 0 <= ratio < 1:
        raise ConfigError(f"ratio: the share of weights to remove, must be in [0, 1), got {ratio}")
