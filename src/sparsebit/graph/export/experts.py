"""Experts of a mixture. Rows of the input are sorted by expert, `offs[i]` is the end of the rows of expert i,
and each expert has its matrix. torch has an op for it (`grouped_mm`, a few dtypes only), and transformers has
a fallback."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """`input[offs[i - 1]:offs[i]] @ weight[i]` for every expert i; rows behind the last offset are 0."""
    ends: list[int] = offs.tolist()
    starts = [0, *ends[:-1]]
    parts = [input[start:end] @ matrix for start, end, matrix in zip(starts, ends, weight)]
    rest = input.new_zeros(input.shape[0] - ends[-1], weight.shape[2])
    return torch.cat([*parts, rest])


class Experts(nn.Module):
    """grouped_mm with a constant weight of shape (experts, in, out)."""

    def __init__(self, experts: int, in_features: int, out_features: int, device: torch.device | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, in_features, out_features, device=device))

    def forward(self, input: Tensor, offs: Tensor) -> Tensor:
        return grouped_mm(input, self.weight, offs)
