"""Searches for the value range of least squared error, or of least KL divergence (Migacz, GTC 2017).

All channels and many candidates at a time, on `Bins`. Values count as evenly spread inside a bin, which gives
the error of rounding in closed form: the integral of (u - n)^2, n = round(u), is n/12 + (u - n)^3/3.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebit.numeric.histogram import Bins
from sparsebit.numeric.spec import QuantSpec

BLOCK = 2**16  # values in work at a time: stays in the cache
SHARES = torch.cat([0.94 ** torch.arange(40.0), 0.94**40 * 0.85 ** torch.arange(28.0)])  # 1 ... 0.001
ZERO_POINTS = 33  # tried at first; all of them at 5 bits and less
STARTS = 4  # grids that are refined
THIN = 64  # values per channel that are rounded to choose the starts
KL_BINS = 2048
KL_STEP = 8  # every how many-th bin is tried as the end of the range


def mse_range(bins: Bins, low: Tensor, high: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The range whose grid has the least squared error on values between `low` and `high`, per channel.

    A grid is a scale and its first code. First all pairs are searched, with an estimate that takes no pass over the
    values per pair. Then the neighbourhood of the best ones is searched with the true error.
    """
    levels = spec.levels
    # squares of float32 stay floats
    unit = torch.maximum(-low, high).clamp(min=torch.finfo(torch.float32).tiny)
    low = (low / unit).double().clamp(max=0)
    high = (high / unit).double().clamp(min=0)
    bins = bins.over(unit)
    if spec.symmetric:
        widest = torch.maximum(-low, high) / max(spec.qmax, 1)
        codes = low.new_tensor([spec.qmin])
    else:
        widest = (high - low) / max(levels - 1, 1)
        codes = torch.linspace(-levels, 0, min(levels + 1, ZERO_POINTS)).to(low).round()
    scale = torch.where(widest > 0, widest, 1) * SHARES.to(widest)[:, None]
    scale, first = _refine(bins, *_starts(bins, scale, codes, levels), levels, len(codes))
    scale = torch.where(widest > 0, scale, 0) * unit
    if spec.symmetric:
        half = scale * levels / 2
        low = torch.where(low < 0, -half, 0)
        high = torch.where(high > 0, half, 0)
    else:
        low = first * scale
        high = (first + levels) * scale
    return low.float(), high.float()


def _starts(bins: Bins, scale: Tensor, codes: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The most promising pairs of `scale` (scales, channels) and first code, as two (starts, channels) tensors."""
    best = []
    if bins.exact:
        size = min(bins.lo.shape[1], 2 * THIN)
    else:
        size = bins.lo.shape[1]
    for part, ks in _blocks(scale, size + len(codes)):
        costs = [_pair_costs(bins[part], scale[k, part], codes, levels) for k in ks]
        best.append(torch.cat(costs, 1).flatten(1).topk(STARTS, largest=False).indices)
    at = torch.cat(best).T
    return scale.gather(0, at // len(codes)), codes[at % len(codes)]


def _pair_costs(bins: Bins, scale: Tensor, codes: Tensor, levels: int) -> Tensor:
    """Squared error of every scale with every first code, (channels, scales, codes): rounding + clipping."""
    step = max(1, bins.lo.shape[1] // THIN) if bins.exact else 1
    sample = _every(step, bins)  # clipping needs every value, rounding does not
    rounding = _errors(sample, scale, torch.full_like(scale, -1e30), 2e30)  # as if codes had no end
    rounding = pad(rounding.cumsum(2), (1, 0)).transpose(0, 1)
    grid = scale.T[..., None]
    first = grid * codes
    last = grid * (codes + levels)
    start, end, clipped = _clipping(bins, first.flatten(1), last.flatten(1))
    start, end = (j.view_as(first).div(step, rounding_mode="floor") for j in (start, end))
    inside = rounding.gather(2, end.clamp_(max=rounding.shape[2] - 1)) - rounding.gather(2, start)
    return inside + clipped.view_as(first)


def _every(step: int, bins: Bins) -> Bins:
    """Every step-th of single values, to stand for all."""
    if step == 1:
        return bins
    values = bins.lo[:, step // 2 :: step].contiguous()
    return Bins(values, values, bins.count[:, step // 2 :: step] * step)


def _clipping(bins: Bins, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For ranges [low, high], (channels, any): first bin inside and after, sum of squared distances of the others."""
    lo = bins.lo.double()
    hi = bins.hi.double()
    count = bins.count.double()
    powers = torch.stack([count, count * (lo + hi) / 2, count * (lo * lo + lo * hi + hi * hi) / 3])
    sums = pad(powers.cumsum(2), (1, 0))
    start, end = (torch.searchsorted((lo + hi) / 2, at.contiguous()) for at in (low, high))
    clipped = torch.zeros_like(low)
    for at, moments in (
        (low, [s.gather(1, start) for s in sums]),
        (high, [s[:, -1:] - s.gather(1, end) for s in sums]),
    ):
        clipped += moments[2] - 2 * at * moments[1] + at * at * moments[0]
    return start, end, clipped


def _refine(bins: Bins, scale: Tensor, first: Tensor, levels: int, codes: int) -> tuple[Tensor, Tensor]:
    """Search near each start (starts, channels) for a better grid; return the best one per channel."""
    hop = levels / max(codes - 1, 1)
    spread = 0.08
    error = scale
    for _ in range(4):
        hop = max(1, round(hop / 2))
        spread = spread / 2
        hops = scale.new_tensor([-hop, 0, hop] if codes > 1 else [0]).view(1, -1, 1, 1)
        factors = scale.new_tensor([1 - spread, 1, 1 + spread]).view(-1, 1, 1, 1)
        near, code = torch.broadcast_tensors(scale * factors, first + hops)
        if codes > 1:
            code = code.clamp(-levels, 0)
        near = near.flatten(0, 1)
        code = code.flatten(0, 1)
        error = squared_error(bins, near.flatten(0, 1), code.flatten(0, 1), levels).view_as(near)
        error, at = error.min(0, keepdim=True)
        scale = near.gather(0, at)[0]
        first = code.gather(0, at)[0]
    at = error[0].argmin(0, keepdim=True)
    return scale.gather(0, at)[0], first.gather(0, at)[0]


def squared_error(bins: Bins, scale: Tensor, first: Tensor, levels: float) -> Tensor:
    """Mean squared error on grids with codes from `first` to `first + levels`; all are (grids, channels)."""
    error = torch.empty(scale.shape, dtype=torch.float64, device=scale.device)
    for part, ks in _blocks(scale, bins.lo.shape[1]):
        for k in ks:
            errors = _errors(bins[part], scale[k, part], first[k, part], levels)
            error[k, part] = errors.sum(2, dtype=torch.float64)
    return error / bins.total()


def _errors(bins: Bins, scale: Tensor, first: Tensor, levels: float) -> Tensor:
    """Sum of squared errors in each bin, (grids, channels, bins)."""
    scale = scale[..., None]
    first = first[..., None]
    if bins.exact:
        scale = scale.float()
        first = first.float()
        u = bins.lo / scale
        return _clamp(u.round(), first, levels).sub_(u).mul_(scale).square_().mul_(bins.count)
    lo = bins.lo.double()
    hi = torch.maximum(bins.hi.double(), lo + lo.abs() * 1e-6 + 1e-30)  # a single value is a very thin bin
    integral = []
    for edge in (lo, hi):
        u = edge / scale
        code = _clamp(u.round(), first, levels)
        integral.append(u.sub_(code).pow_(3).div_(3).add_(code, alpha=1 / 12))
    return integral[1].sub_(integral[0]).mul_(bins.count / (hi - lo)).mul_(scale**3)


def _blocks(scale: Tensor, size: int) -> Iterator[tuple[slice, list[slice]]]:
    """Chunks of channels, each with a chunk of its grids, at `size` values per pair of channel and grid."""
    grids = max(1, min(len(scale), BLOCK // size))
    channels = max(1, BLOCK // (size * grids))
    ks = [slice(k, k + grids) for k in range(0, len(scale), grids)]
    for c in range(0, scale.shape[1], channels):
        yield slice(c, c + channels), ks


def _clamp(code: Tensor, first: Tensor, levels: float) -> Tensor:
    """Clamp in place, twice as fast as clamp_ with tensors for bounds."""
    return torch.minimum(torch.maximum(code, first, out=code), first + levels, out=code)


def linear_histogram(bins: Bins, high: Tensor, size: int = KL_BINS) -> Tensor:
    """Counts of the (non-negative) values of `bins` on `size` equal bins from 0 to `high`."""
    edges = torch.linspace(0, 1, size + 1, dtype=torch.float64, device=high.device) * high.double()[:, None]
    edges[:, -1] = torch.inf
    lo = bins.lo.double().contiguous()
    hi = bins.hi.double().contiguous()
    before = torch.cat([torch.zeros_like(lo[:, :1]), bins.count.cumsum(1, dtype=torch.float64)], 1)
    j = torch.searchsorted(hi, edges)  # bins that end before the edge lie wholly below it
    inside = j.clamp(max=hi.shape[1] - 1)
    start = lo.gather(1, inside)
    width = (hi - lo).gather(1, inside)
    share = ((edges - start) / width.clamp(min=1e-300)).clamp_(0, 1).nan_to_num_()
    share = torch.where(j > inside, torch.zeros_like(share), share)
    below = before.gather(1, j) + share * bins.count.double().gather(1, inside)
    below[:, 0] = 0
    return below.diff(dim=1).clamp_(min=0)


def kl_threshold(counts: Tensor, levels: Tensor) -> Tensor:
    """The number of bins of `counts` (channels, bins) to keep, per channel, for the least divergence.

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
    cum, filled, entropy = (pad(t.cumsum(1), (1, 0)) for t in (h, (h > 0).double(), torch.xlogy(h, h)))
    kept = cum[:, ends]
    beyond = total - kept
    groups = torch.arange(int(levels.max()) + 1, device=h.device)
    cuts = ends[:, None] * groups // levels[:, None, None]  # (channels, ends, groups + 1)
    cuts = cuts.minimum(ends[:, None])
    mass, used = (t.gather(1, cuts.flatten(1)).view_as(cuts).diff(dim=2) for t in (cum, filled))
    last = h[:, ends - 1]
    # larger values are in P's last bin, and so in the last group
    tail = (torch.arange(mass.shape[2], device=h.device) == (levels - 1)[:, None, None]).double()
    p = mass + tail * beyond[..., None]
    used = used + tail * ((last == 0) & (beyond > 0)).double()[..., None]
    cross = torch.where(p > 0, p * (mass / used.clamp(min=1)).log(), 0.0).sum(2)
    own = entropy[:, ends - 1] + torch.xlogy(last + beyond, last + beyond)
    result = (own - cross) / total - total.log() + kept.log()
    return torch.where((kept > 0) & (ends >= levels[:, None]), result, torch.inf)
