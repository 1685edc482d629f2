"""The pair rule: 8-bit weights that every x86 CPU multiplies exactly.

Without VNNI, x86 multiplies uint8 activations by int8 weights with vpmaddubsw: two neighbouring products are added in
16 bits, and the sum is cut at 32767. A sum a0 w0 + a1 w1 with activations up to 255 fits if

    -128 <= w0 + w1 <= 128

Neighbours are the positions 2i and 2i + 1 of the order in which the kernel sums: (kernel position, input channel) for a
convolution, the inputs for a matrix product. The two codes of a pair that breaks the rule move to the nearest codes
whose sum is 128. A larger scale makes such pairs rare; `exact_scale` takes the scale with the least squared error.
No option of a session is needed then, and nothing is lost in speed.
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


def keep_pairs(values: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """`values`, which are rounded to the grid, with the pairs that break the rule moved. The gradient passes."""
    rows = in_sum_order(values.detach().float())
    steps = scale.detach().float().reshape(-1, 1)
    total = _pairs(rows).sum(-1)
    wrong = (total.abs() > (LARGEST_SUM + 0.25) * steps).nonzero(as_tuple=True)
    if not len(wrong[0]):
        return values
    step = steps.expand(len(rows), 1)[wrong[0]]
    first, second = (_pairs(rows)[wrong] / step).unbind(-1)
    limit = total[wrong].sign() * LARGEST_SUM
    first = ((first - second + limit) / 2).round().clamp(spec.qmin, spec.qmax)
    rows = rows.clone()
    _pairs(rows)[wrong] = torch.stack([first, limit - first], -1) * step
    kernel_last = rows.reshape(values.shape[0], *values.shape[2:], values.shape[1])
    moved = kernel_last.movedim(-1, 1).to(values.dtype)
    if values.requires_grad:
        return values + (moved - values).detach()
    return moved


def exact_scale(weight: Tensor, qparams: QParams, spec: QuantSpec) -> Tensor:
    """Per channel, the scale s with the least expected error under the rule: from one to two times the given one.

        values s^2 / 12  +  sum over pairs of max(0, |w0 + w1| - 128 s)^2 / 2

    The first term is the error of rounding, the second one that of moving pairs. At two times, no pair moves.
    """
    rows = in_sum_order(weight.detach().float())
    start = qparams.scale.detach().float()
    if len(start) > 1:
        owner = torch.arange(len(rows), device=rows.device)
    else:
        owner = torch.zeros_like(rows[:, 0]).long()
    sums = _pairs(rows).sum(-1).abs()
    large = (sums > LARGEST_SUM * start[owner, None]).nonzero(as_tuple=True)
    sums = sums[large]
    owner_of_pair = owner[large[0]]
    values = torch.zeros_like(start).index_add_(0, owner, (rows != 0).sum(1).float())
    best = start
    least = torch.full_like(start, float("inf"))
    for factor in FACTORS if len(sums) else ():
        scale = start * factor
        excess = (sums - LARGEST_SUM * scale[owner_of_pair]).clamp_min_(0).square_() / 2
        error = (values * scale.square() / 12).index_add_(0, owner_of_pair, excess)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


def breaks_rule(codes: Tensor) -> Tensor:
    """Count the pairs of `codes`, (out, in, *kernel), whose sum is too large for a 16-bit sum of two products."""
    return (_pairs(in_sum_order(codes.float())).sum(-1).abs() > LARGEST_SUM).sum()


def _pairs(rows: Tensor) -> Tensor:
    """(..., K) -> (..., K // 2, 2), a view; the last of an odd number of values has no neighbour."""
    even = rows.shape[-1] // 2 * 2
    return rows[..., :even].unflatten(-1, (-1, 2))
