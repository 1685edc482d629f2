"""The pair rule: 8-bit weights that every x86 CPU multiplies exactly.

Without VNNI, x86 multiplies uint8 activations by int8 weights with vpmaddubsw: two neighbouring products are added in
16 bits, and the sum is cut at 32767. A sum a0 w0 + a1 w1 with activations up to 255 fits if

    -128 <= w0 + w1 <= 128

Neighbours are the positions 2i and 2i + 1 of the order in which the kernel sums: (kernel position, input channel) for a
convolution, the inputs for a matrix product. The two codes of a pair that breaks the rule move to the nearest codes
whose sum is 128. A larger scale makes such pairs rare; `exact_scale` takes the scale with the least squared error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.numeric.spec import QParams, QuantSpec

LARGEST_SUM = 128
FACTORS = torch.linspace(1, 2, 65).tolist()  # of the scale without the rule


def needs_rule(spec: QuantSpec) -> bool:
    """Can two codes of this grid add up to more than the rule allows? 7-bit codes cannot."""
    return spec.symmetric and spec.qmax * 2 > LARGEST_SUM and spec.bits <= 8 and spec.group is None


def in_sum_order(weight: Tensor) -> Tensor:
    """(out, in, *kernel) -> (out, values in the order in which the kernel sums them)."""
    return weight.movedim(1, -1).flatten(1)


def exact_codes(weight: Tensor, qparams: QParams, spec: QuantSpec) -> Tensor:
    """The codes of `weight` under the rule, as floats, in its shape; channels are axis 0."""
    codes = _codes(in_sum_order(weight.detach().float()), _rows(qparams.scale), spec)
    kernel_last = codes.reshape(weight.shape[0], *weight.shape[2:], weight.shape[1])
    return kernel_last.movedim(-1, 1)


def keep_pairs(weight: Tensor, qparams: QParams, spec: QuantSpec) -> Tensor:
    """`weight`, with the values of pairs that break the rule moved to codes that keep it. The gradient passes."""
    scale = qparams.scale.detach().float()
    steps = scale.reshape(-1, *[1] * (weight.dim() - 1))
    plain = (weight.detach().float() / steps).round().clamp(spec.qmin, spec.qmax)
    codes = exact_codes(weight, QParams(scale, qparams.zero_point), spec)
    moved = torch.where(codes != plain, codes * steps, weight.detach().float()).to(weight.dtype)
    return weight + (moved - weight.detach()) if weight.requires_grad else moved


def exact_scale(weight: Tensor, qparams: QParams, spec: QuantSpec) -> Tensor:
    """Per channel, the scale s with the least expected error under the rule: from one to two times the given one.

        values s^2 / 12  +  sum over pairs of max(0, |w0 + w1| - 128 s)^2 / 2

    The first term is the error of rounding, the second one that of moving pairs. At two times, no pair moves.
    """
    rows = in_sum_order(weight.detach().float())
    start = qparams.scale.detach().float()
    owner = (
        torch.arange(len(rows), device=rows.device) if len(start) > 1 else torch.zeros_like(rows[:, 0]).long()
    )
    sums = _pairs(rows).sum(-1).abs()
    large = (sums > LARGEST_SUM * start[owner, None]).nonzero(as_tuple=True)
    sums, owner_of_pair = sums[large], owner[large[0]]
    values = torch.zeros_like(start).index_add_(0, owner, (rows != 0).sum(1).float())
    best, least = start, torch.full_like(start, float("inf"))
    for factor in FACTORS if len(sums) else ():
        scale = start * factor
        excess = (sums - LARGEST_SUM * scale[owner_of_pair]).clamp_min_(0).square_() / 2
        error = (values * scale.square() / 12).index_add_(0, owner_of_pair, excess)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def breaks_rule(codes: Tensor) -> Tensor:
    """How many pairs of `codes`, (out, in, *kernel), add up to more than a 16-bit sum of two products holds."""
    return (_pairs(in_sum_order(codes.float())).sum(-1).abs() > LARGEST_SUM).sum()


def _rows(scale: Tensor) -> Tensor:
    return scale.detach().float().reshape(-1, 1)


def _codes(rows: Tensor, steps: Tensor, spec: QuantSpec) -> Tensor:
    """Nearest codes whose neighbours add up to at most 128."""
    units = (rows / steps).clamp_(spec.qmin, spec.qmax)
    codes = units.round()
    total = _pairs(codes).sum(-1)
    wrong = (total.abs() > LARGEST_SUM).nonzero(as_tuple=True)
    if len(wrong[0]):
        first, second = _pairs(units)[wrong].unbind(-1)
        limit = total[wrong].sign() * LARGEST_SUM
        first = (first - (first + second - limit) / 2).round().clamp(spec.qmin, spec.qmax)
        _pairs(codes)[wrong] = torch.stack([first, limit - first], -1)
    return codes


def _pairs(rows: Tensor) -> Tensor:
    """(..., K) -> (..., K // 2, 2), a view; the last of an odd number of values has no neighbour."""
    even = rows.shape[-1] // 2 * 2
    return rows[..., :even].unflatten(-1, (-1, 2))
