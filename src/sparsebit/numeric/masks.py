"""Masks of single weights: exactly as many go as were asked for, ties broken by position."""

from __future__ import annotations

import torch
from torch import Tensor


def count_of(n: int, ratio: float) -> int:
    """`ratio` of n, down; 0.29 of 100 is 29."""
    return min(int(n * ratio + 1e-9), n)


def keep_best(worth: Tensor, ratio: float, per_row: bool = False) -> Tensor:
    """A mask that is True for the values to keep, of the whole tensor or of every row. The best value is always
    kept."""
    if per_row:
        rows = worth.reshape(worth.shape[0], -1)
    else:
        rows = worth.reshape(1, -1)
    count = min(count_of(rows.shape[1], ratio), max(rows.shape[1] - 1, 0))
    gone = rows.argsort(dim=1, stable=True)[:, :count]
    return torch.ones_like(rows, dtype=torch.bool).scatter_(1, gone, False).view_as(worth)


def n_of_m(worth: Tensor, n: int, m: int, axis: int = 1) -> Tensor:
    """The best n of every m along `axis` stay; of a last group that is not full, all do."""
    moved = worth.movedim(axis, -1)
    full = moved.shape[-1] // m * m
    groups = moved[..., :full].reshape(*moved.shape[:-1], -1, m)
    gone = groups.argsort(dim=-1, stable=True)[..., : m - n]
    mask = torch.ones_like(moved, dtype=torch.bool)
    mask[..., :full] = torch.ones_like(groups, dtype=torch.bool).scatter_(-1, gone, False).flatten(-2)
    return mask.movedim(-1, axis)


def keep_best_of_all(worths: list[Tensor], ratio: float) -> list[Tensor]:
    """One ranking over several tensors; none of them loses everything."""
    flat = torch.cat([w.reshape(-1).double() for w in worths])
    best = []
    offset = 0
    for w in worths:
        best += [offset + int(w.reshape(-1).argmax())] if w.numel() else []
        offset += w.numel()
    mask = keep_best(flat.index_fill(0, torch.tensor(best, device=flat.device), float("inf")), ratio)
    mask[best] = True
    return [part.view_as(w) for part, w in zip(mask.split([w.numel() for w in worths]), worths)]
