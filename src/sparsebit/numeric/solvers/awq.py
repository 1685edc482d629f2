"""AWQ: input channels that carry large activations get larger weights before rounding (Lin et al., 2023).

Q(W s) s^-1 with s = x^a, or x^a / w^(1-a): x the size of a channel's inputs, w that of its weights within their
groups. The exponent with the least error on the outputs, tr((W - Q) H (W - Q)^T), wins; then ranges are clipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.numeric.quantized_weight import QuantizedWeight, check, round_to
from sparsebit.numeric.solvers.gptq import Statistics
from sparsebit.numeric.solvers.rtn import SHRINK, at_least_float, grid_of, rtn, signs_of
from sparsebit.numeric.spec import QuantSpec

SEARCHED = 128  # rows of each layer on which exponents are compared
COARSE = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # shares of the range that are tried meanwhile


def awq(
    weight: Tensor,
    statistics: Statistics | None,
    spec: QuantSpec,
    *,
    clip: str = "mse",
    scale_dtype: torch.dtype = torch.float16,
) -> QuantizedWeight:
    """The second half: `weight` (scaled already) on the grid whose clipped range loses least on these inputs."""
    if statistics is None:
        importance = None
    else:
        importance = statistics.hessian.diagonal().float()
    return rtn(weight, importance, spec, clip=clip, scale_dtype=scale_dtype)


def awq_scales(
    weights: Sequence[Tensor],
    statistics: Statistics,
    specs: Sequence[QuantSpec],
    tie: Tensor | None = None,
    *,
    points: int = 20,
    clip: str = "mse",
    scale_dtype: torch.dtype = torch.float16,
) -> Tensor:
    """(inputs,): what the inputs of these layers are divided by and their weights multiplied with.

    tie      channels with one number here must have one scale.
    points   exponents that are tried, for either formula.

    Never worse than no scales, on the rows that are compared.
    """
    if points < 1:
        raise ConfigError(f"points: at least one exponent must be tried, got {points}")
    for weight, spec in zip(weights, specs):
        check(weight, spec)
    matrices = [at_least_float(w) for w in weights]
    h = statistics.hessian.float()

    def error(s: Tensor, rows: int, shares: Sequence[float]) -> float:
        """Rows are independent: some of them, evenly spread, tell the best scales from the others."""
        total = 0.0
        for w, spec in zip(matrices, specs):
            w = w[:: -(-len(w) // rows)]
            gap = w - _rounded(w * s, h.diagonal() / s.square(), spec, shares, scale_dtype) / s
            total += float(((gap @ h) * gap).sum())
        return total

    size = h.diagonal().clamp(min=0).div(max(statistics.tokens, 1)).sqrt()
    tried = [tied(s, tie) for s in _candidates(matrices, size, specs, points)]
    coarse, fine = (COARSE, SHRINK.tolist()) if clip == "mse" else ((1.0,), [1.0])
    best = min(tried, key=lambda s: error(s, SEARCHED, coarse))
    ones = torch.ones_like(size)
    if error(best, SEARCHED, fine) < error(ones, SEARCHED, fine):
        return best
    return ones


def _rounded(
    w: Tensor, importance: Tensor, spec: QuantSpec, shares: Sequence[float], scale_dtype: torch.dtype
) -> Tensor:
    """The matrix on its grid values: of these shares of each group's range, the one that loses least."""
    group = min(spec.group or w.shape[1], w.shape[1])
    pad = -w.shape[1] % group
    grouped = F.pad(w, (0, pad)).unflatten(1, (-1, group))
    weights = F.pad(importance, (0, pad)).unflatten(0, (-1, group))
    low = grouped.amin(-1, keepdim=True).clamp(max=0)
    high = grouped.amax(-1, keepdim=True).clamp(min=0)
    if spec.symmetric:
        high = torch.maximum(-low, high)
        low = -high
    best = grouped
    least = torch.full_like(low, float("inf"))
    signs = signs_of(spec) if len(shares) > 1 else (1,)
    for share, sign in itertools.product(shares, signs):
        scale, zero = grid_of(low * share, high * share, spec, scale_dtype)
        scale = scale * sign
        back = round_to(grouped, scale, zero, spec.bits).sub_(zero).mul_(scale)
        error = (back - grouped).square_().mul_(weights).sum(-1, keepdim=True)
        best = torch.where(error < least, back, best)
        least = torch.minimum(error, least)
    return best.flatten(1)[:, : w.shape[1]]


def tied(s: Tensor, tie: Tensor | None) -> Tensor:
    """Scales around 1 (geometric mean of the ends), in the range of every dtype, with one value for tied channels."""
    s = s.clamp(min=1e-4)
    s = (s / (s.max() * s.min()).sqrt()).clamp(1e-3, 1e3)
    if tie is None:
        return s
    n = int(tie.max()) + 1
    total = torch.zeros(n, device=s.device).index_add_(0, tie, s.log())
    count = torch.zeros(n, device=s.device).index_add_(0, tie, torch.ones_like(s))
    return (total / count.clamp(min=1)).exp()[tie]


def _candidates(
    weights: list[Tensor], size: Tensor, specs: Sequence[QuantSpec], points: int
) -> Iterator[Tensor]:
    share = sum(_share_of_range(w, spec.group) for w, spec in zip(weights, specs))
    for i in range(points):
        a = i / points
        yield size.clamp(min=1e-4) ** a
        yield size.clamp(min=1e-4) ** a / share.clamp(min=1e-4) ** (1 - a)  # type: ignore[union-attr]


def _share_of_range(w: Tensor, group: int | None) -> Tensor:
    """(inputs,): mean size of a channel's weights as a share of the largest in their group."""
    group = min(group or w.shape[1], w.shape[1])
    padded = F.pad(w.abs(), (0, -w.shape[1] % group)).unflatten(1, (-1, group))
    share = padded / padded.amax(-1, keepdim=True).clamp(min=1e-12)
    return share.flatten(1)[:, : w.shape[1]].mean(0)
