"""Searches for the value range of least squared error, or of least KL divergence (Migacz, GTC 2017).

All channels and many candidates at a time, on `Bins`. Values count as evenly spread inside a bin, which gives
the error of rounding in closed form: the integral of (u - n)^2, n = round(u), is n/12 + (u - n)^3/3.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sparsebit.numeric.histogram import Bins
from sparsebit.numeric.qparams import qparams_from_minmax
from sparsebit.numeric.spec import QuantSpec

BLOCK = 2**16  # values in work at a time: stays in the cache
KL_BINS = 2048
KL_STEP = 8  # every how many-th bin is tried as the end of the range


def mse_range(bins: Bins, low: Tensor, high: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The range [lo, hi] within [low, high] whose grid has the least squared error, per channel.

    Both ends shrink together; where both signs occur and the grid may be lopsided, then each end alone.
    """
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    # a signed grid has one code less above zero; the largest value may deserve it
    most = spec.levels / (2 * spec.qmax) if spec.symmetric and spec.qmax else 1.0
    fine = torch.arange(100, 20, -1) / 100
    coarse = 0.2 * 2 ** (-torch.arange(0, 40) / 4)  # 10 octaves, for outliers
    shares = (torch.cat([fine, coarse]) * most).to(low)[:, None]
    lo, hi = _best(bins, spec, [(low * shares, high * shares)])
    if not spec.symmetric and bool(((low < 0) & (high > 0)).any()):
        shares = shares[::2]
        for _ in range(2):
            lo, hi = _best(bins, spec, [(lo, hi), (lo.expand(len(shares), -1), high * shares)])
            lo, hi = _best(bins, spec, [(lo, hi), (low * shares, hi.expand(len(shares), -1))])
    near = torch.linspace(0.95, 1.05, 21).to(low)[:, None]
    near_lo, near_hi = (lo * near).clamp_(min=low * most), (hi * near).clamp_(max=high * most)
    return _best(bins, spec, [(near_lo, near_hi)])


def _best(bins: Bins, spec: QuantSpec, ranges: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Of the candidates, shaped (candidates, channels) or (channels,), the best of each channel."""
    pairs = [(lo.reshape(-1, lo.shape[-1]), hi.reshape(-1, hi.shape[-1])) for lo, hi in ranges]
    lo, hi = (torch.cat(ends) for ends in zip(*pairs))
    at = squared_error(bins, lo, hi, spec).argmin(0, keepdim=True)
    return lo.gather(0, at)[0], hi.gather(0, at)[0]


def squared_error(bins: Bins, lo: Tensor, hi: Tensor, spec: QuantSpec) -> Tensor:
    """Mean squared error on the grids of the ranges [lo, hi]; all three are (candidates, channels)."""
    qparams = qparams_from_minmax(lo, hi, spec)
    scale = qparams.scale.view_as(lo)
    first = spec.qmin - qparams.zero_point.view_as(lo)
    error = torch.empty(lo.shape, dtype=torch.float64, device=lo.device)
    size = bins.lo.shape[1]
    some = max(1, min(len(lo), BLOCK // size))
    channels = max(1, BLOCK // (some * size))
    for c in range(0, lo.shape[1], channels):
        part = slice(c, c + channels)
        for k in range(0, len(lo), some):
            here = slice(k, k + some), part
            error[here] = _error(bins, part, scale[here], first[here], spec.levels)
    return error / bins.total()


def _error(bins: Bins, part: slice, scale: Tensor, first: Tensor, levels: int) -> Tensor:
    """Sum of squared errors; codes run from `first` to `first + levels`."""
    count, step = bins.count[part], scale[..., None]
    if bins.exact:
        u = bins.lo[part] / step
        code = _clamp(u.round(), first[..., None], levels)
        return code.sub_(u).square_().mul_(count).sum(-1).double() * scale.double().square()
    step, first = step.double(), first[..., None].double()
    lo = bins.lo[part].double()
    hi = torch.maximum(
        bins.hi[part].double(), lo + lo.abs() * 1e-6 + 1e-30
    )  # a single value is a very thin bin
    integral = []
    for edge in (lo, hi):
        u = edge / step
        code = _clamp(u.round(), first, levels)
        integral.append(u.sub_(code).pow_(3).div_(3).add_(code, alpha=1 / 12))
    return integral[1].sub_(integral[0]).mul_(count / (hi - lo)).sum(-1) * scale.double() ** 3


def _clamp(code: Tensor, first: Tensor, levels: int) -> Tensor:
    """In place; twice as fast as clamp_ with tensors for bounds."""
    return torch.minimum(torch.maximum(code, first, out=code), first + levels, out=code)


def linear_histogram(bins: Bins, high: Tensor, size: int = KL_BINS) -> Tensor:
    """Counts of the (non-negative) values of `bins` on `size` equal bins from 0 to `high`."""
    edges = torch.linspace(0, 1, size + 1, dtype=torch.float64, device=high.device) * high.double()[:, None]
    edges[:, -1] = torch.inf
    lo, hi = bins.lo.double().contiguous(), bins.hi.double().contiguous()
    before = torch.cat([torch.zeros_like(lo[:, :1]), bins.count.cumsum(1, dtype=torch.float64)], 1)
    j = torch.searchsorted(hi, edges)  # bins that end before the edge lie wholly below it
    inside = j.clamp(max=hi.shape[1] - 1)
    start, width = lo.gather(1, inside), (hi - lo).gather(1, inside)
    share = ((edges - start) / width.clamp(min=1e-300)).clamp_(0, 1).nan_to_num_()
    share = torch.where(j > inside, torch.zeros_like(share), share)
    below = before.gather(1, j) + share * bins.count.double().gather(1, inside)
    below[:, 0] = 0
    return below.diff(dim=1).clamp_(min=0)


def kl_threshold(counts: Tensor, levels: Tensor) -> Tensor:
    """How many of the bins of `counts` (channels, bins) to keep, per channel, for the least divergence.

    Candidate i: P is the first i bins with all counts beyond added to the last; Q is the first i bins merged
    into `levels` groups and spread evenly again over the bins that P fills. Sums over groups come from prefix
    sums, so a candidate costs `levels` steps instead of a pass over the bins.
    """
    size = counts.shape[1]
    levels = levels.clamp(max=size)
    start = max(int(levels.min()), KL_STEP)
    ends = torch.arange(start - start % -KL_STEP, size + 1, KL_STEP, device=counts.device)
    best = torch.empty_like(levels)
    block = max(1, BLOCK // (len(ends) * int(levels.max())))
    for c in range(0, len(counts), block):
        divergence = _divergence(counts[c : c + block], levels[c : c + block], ends)
        best[c : c + block] = ends[divergence.argmin(1)]
    return best


def _divergence(h: Tensor, levels: Tensor, ends: Tensor) -> Tensor:
    """KL(P, Q) of each channel and candidate end; infinite where Q is 0 and P is not."""
    total = h.sum(1, keepdim=True)
    cum, filled, entropy = (
        torch.nn.functional.pad(t.cumsum(1), (1, 0)) for t in (h, (h > 0).double(), torch.xlogy(h, h))
    )
    kept = cum[:, ends]
    beyond = total - kept
    groups = torch.arange(int(levels.max()) + 1, device=h.device)
    cuts = (ends[:, None] * groups // levels[:, None, None]).minimum(
        ends[:, None]
    )  # (channels, ends, groups + 1)
    mass, used = (t.gather(1, cuts.flatten(1)).view_as(cuts).diff(dim=2) for t in (cum, filled))
    last = h[:, ends - 1]
    # P's last bin holds what lies beyond; it belongs to the last group that is not empty
    tail = (torch.arange(mass.shape[2], device=h.device) == (levels - 1)[:, None, None]).double()
    p = mass + tail * beyond[..., None]
    used = used + tail * ((last == 0) & (beyond > 0)).double()[..., None]
    cross = torch.where(p > 0, p * (mass / used.clamp(min=1)).log(), 0.0).sum(2)
    own = entropy[:, ends - 1] + torch.xlogy(last + beyond, last + beyond)
    result = (own - cross) / total - total.log() + kept.log()
    return torch.where(kept > 0, result, torch.inf)
