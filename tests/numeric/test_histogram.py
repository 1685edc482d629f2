"""The streaming histogram is exact about what it counts; searches on it agree with brute force on whole data."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from sparsebit.numeric import QuantSpec, fake_quantize, qparams_from_minmax
from sparsebit.numeric.histogram import (
    OCTAVES,
    Bins,
    Histogram,
    channel_minmax,
    image_minmax,
    sample_stride,
)
from sparsebit.numeric.search import kl_threshold, linear_histogram, mse_range, squared_error


def filled(parts, exact=0):
    hist = Histogram(len(parts[0]), exact)
    for rows in parts:
        hist.add(rows, rows.amin(1), rows.amax(1))
    return hist


def extremes(parts):
    x = torch.cat(parts, 1)
    return x.amin(1), x.amax(1)


PARTS = [
    torch.randn(3, 5000, generator=torch.Generator().manual_seed(i)) * s for i, s in enumerate((0.01, 300, 1))
]


def test_every_value_is_counted_in_the_bin_that_holds_it():
    low, high = extremes(PARTS)
    bins = filled(PARTS).bins(low, high)
    assert not bins.exact
    assert (bins.hi - bins.lo <= torch.maximum(bins.lo.abs(), bins.hi.abs()) * 2**-10).all()
    for c, x in enumerate(torch.cat(PARTS, 1)):
        seen = torch.where(
            x.abs() < high.maximum(-low)[c] * 2.0 ** -(OCTAVES - 2), 0.0, x
        )  # small ones count as 0
        # the sum of all values lies between the sums of all lower and of all upper ends
        below, above = ((e[c].double() * bins.count[c]).sum() for e in (bins.lo, bins.hi))
        slack = (x - seen).abs().double().sum()
        assert below - slack <= x.double().sum() <= above + slack
        for t in (-100.0, -1.0, -0.125, 0.5, 2.0, 64.0):  # edges of bins: counts on either side are exact
            assert bins.count[c][bins.lo[c] >= t].sum() == (x >= t).sum()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("exact", [0, 12_000, 20_000])
def test_batch_order_and_merging_do_not_matter(order, exact):
    low, high = extremes(PARTS)
    whole = filled(PARTS, exact).bins(low, high)
    shuffled = filled([PARTS[i] for i in order], exact).bins(low, high)
    merged = filled([PARTS[order[0]]], exact)
    merged.merge(filled([PARTS[i] for i in order[1:]], exact))
    for other in (shuffled, merged.bins(low, high)):
        for a, b in zip((whole.lo, whole.hi, whole.count), (other.lo, other.hi, other.count)):
            assert torch.equal(a, b)
    assert whole.exact == (exact == 20_000)


def test_merging_leaves_the_other_untouched():
    a, b = filled(PARTS[:1]), filled(PARTS[1:])
    before = b.counts.clone()
    a.merge(b)
    assert torch.equal(b.counts, before)


def test_an_outlier_does_not_coarsen_the_bulk():
    x = torch.randn(1, 20_000)
    x[0, 0] = 3000.0
    low, high = x.amin(1), x.amax(1)
    bins = filled([x]).bins(low, high)
    for k in (20, 4000, 16_000, 19_980):
        want = x.kthvalue(k).values.item()
        assert bins.kth(torch.tensor([float(k)])).item() == pytest.approx(want, rel=2e-3)


@pytest.mark.parametrize("tiny", [0.0, 1e-42, 1e-30])
def test_zeros_and_denormals(tiny):
    x = torch.full((2, 100), tiny)
    bins = filled([x]).bins(x.amin(1), x.amax(1))
    assert bins.total().tolist() == [100, 100]
    assert (bins.lo <= tiny).all() and (bins.hi <= tiny).all()


def test_largest_floats_keep_finite_bins():
    x = torch.tensor([[-3.4e38, 1e38, 3.4e38]])
    bins = filled([x]).bins(x.amin(1), x.amax(1))
    assert bins.lo.isfinite().all() and bins.hi.isfinite().all() and bins.total() == 3


def test_a_stride_weighs_its_samples_and_keeps_the_extremes():
    x = torch.rand(1, 100_000)
    x[0, 1] = 50.03  # not on the stride, and inside a bin
    hist = Histogram(1)
    hist.add(x, x.amin(1), x.amax(1), stride=7)
    bins = hist.bins(x.amin(1), x.amax(1))
    assert bins.total().item() == pytest.approx(100_000, rel=1e-3)
    assert bins.kth(bins.total()).item() == x.max().item()


@pytest.mark.parametrize("channels", [1, 3, 64, 2048, 40_000])
def test_state_is_small_with_many_channels(channels):
    hist = Histogram(channels)
    assert channels * (2 * hist.half + 1) <= max(2**20, channels * 1100)
    assert hist.limit <= 2 * hist.half + 1


@pytest.mark.parametrize("samples", [1, 65_536, 301_056, 376_320, 1_204_224, 9_633_792])
def test_sampling_sees_all_residues(samples):
    stride = sample_stride(1, samples)
    assert math.gcd(stride, samples) == 1
    assert samples // stride >= min(samples, 2**15)
    assert samples // stride <= 2**17


def test_kth_is_exact_for_kept_values():
    x = torch.randn(4, 1000)
    bins = filled([x[:, :400], x[:, 400:]], exact=1000).bins(x.amin(1), x.amax(1))
    for k in (1, 2, 500, 999, 1000):
        assert torch.equal(bins.kth(torch.full((4,), float(k))).float(), x.kthvalue(k, 1).values)
        assert torch.equal(-bins.negated().kth(torch.full((4,), 1001.0 - k)).float(), x.kthvalue(k, 1).values)


LAYOUTS = {
    "nchw": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [5, 200])  # 200: large enough to go image by image
def test_minmax_of_channels_and_images(layout, size):
    x = LAYOUTS[layout](torch.randn(3, 4, size, size))
    for axis in (None, 1, 3):
        want = x.reshape(1, -1) if axis is None else x.movedim(axis, 0).flatten(1)
        for got, end in zip(channel_minmax(x, axis), (want.amin(1), want.amax(1))):
            assert torch.equal(got, end)
        images = [channel_minmax(image, None if axis is None else axis - 1) for image in x]
        for got, end in zip(image_minmax(x, axis), zip(*images)):
            assert torch.equal(got, torch.stack(end))


def test_minmax_of_few_dimensions():
    x = torch.tensor([3.0, -1.0, 2.0])
    assert image_minmax(x, None)[0].tolist() == [[3], [-1], [2]]  # three images of one value
    assert image_minmax(x, 1)[0].tolist() == [[3, -1, 2]]  # one image of three channels
    assert image_minmax(x[0], 1)[1].tolist() == [[3]]
    assert image_minmax(x[None].repeat(2, 1), 2)[0].tolist() == [[3, -1, 2]] * 2  # NLC fed with NC
    assert channel_minmax(x[0], 0)[0].tolist() == [3]


def test_nan_wins():
    x = torch.randn(2, 3, 8, 8)
    x[1, 1, 2, 2] = torch.nan
    assert channel_minmax(x, None)[0].isnan().all()
    assert channel_minmax(x, 1)[1].isnan().tolist() == [False, True, False]
    assert image_minmax(x, None)[0].isnan().flatten().tolist() == [False, True]


# -- searches ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [2, 4, 8, 12])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("exact", [0, 10**6])
def test_squared_error_agrees_with_fake_quantization(bits, symmetric, exact):
    x = torch.randn(2, 60_000) * torch.tensor([[1.0], [7.0]]) + torch.tensor([[0.5], [0.0]])
    spec = QuantSpec(bits, symmetric, axis=0)
    low, high = x.amin(1), x.amax(1)
    shares = torch.tensor([1.0, 0.7, 0.3, 0.05])[:, None]
    bins = filled([x], exact).bins(low, high, mantissa=6)
    assert bins.exact == bool(exact)
    for share in shares:
        qparams = qparams_from_minmax(low * share, high * share, spec)
        error = squared_error(bins, qparams.scale[None], spec.qmin - qparams.zero_point[None], spec.levels)
        want = fake_quantize(x, qparams, spec) - x
        assert torch.allclose(error[0], want.double().square().mean(1), rtol=1e-4 if exact else 0.02)


def test_a_mass_at_the_end_of_the_range_is_a_point():
    x = torch.rand(1, 50_000) * 10
    x.clamp_(max=6.0)  # ReLU6: 40 % of the values are exactly 6
    spec = QuantSpec(4, symmetric=False)
    bins = filled([x]).bins(x.amin(1), x.amax(1), mantissa=6)
    error = squared_error(bins, torch.full((1, 1), 6 / 15), torch.zeros(1, 1), 15)
    assert error.item() == pytest.approx(0.6 * (6 / 15) ** 2 / 12, rel=0.02)  # the 6s cost nothing
    lo, hi = mse_range(bins, x.amin(1), x.amax(1), spec)
    assert lo.item() == 0 and hi.item() == pytest.approx(6.0, rel=0.01)


@pytest.mark.parametrize("exact", [0, 10**6])
def test_linear_histogram_counts(exact):
    x = torch.randn(2, 30_000).abs()
    x[1] *= 100
    bins = filled([x], exact).bins(x.amin(1), x.amax(1), absolute=True)
    got = linear_histogram(bins, x.amax(1), 64)
    assert torch.allclose(got.sum(1), torch.tensor(30_000.0).double())
    for c in range(2):
        want = torch.histc(x[c], 64, 0, x[c].max().item()).double()
        assert (got[c] - want).abs().max() <= (2 if exact else 0.01 * want.max())


def naive_divergence(h, end, levels):
    """KL by its definition: build P and Q bin by bin."""
    p = h[:end].clone()
    p[-1] += h[end:].sum()
    q = torch.zeros(end, dtype=torch.float64)
    cuts = [end * g // levels for g in range(levels + 1)]
    for a, b in itertools.pairwise(cuts):
        filled_bins = p[a:b] > 0
        if filled_bins.any():
            q[a:b][filled_bins] = h[a:b].sum() / filled_bins.sum()
    p, q = p / p.sum(), q / q.sum()
    on = p > 0
    return (p[on] * (p[on] / q[on]).log()).sum().nan_to_num(torch.inf).item()


@pytest.mark.parametrize("levels", [2, 8, 127])
def test_kl_threshold_is_the_argmin(levels):
    data = torch.stack([torch.randn(20_000).abs(), torch.rand(20_000), torch.randn(20_000).abs()])
    data[2, :20] *= 15
    counts = torch.stack([torch.histc(x, 512, 0, x.max().item()) for x in data]).double()
    got = kl_threshold(counts, torch.full((3,), levels))
    for h, end in zip(counts, got):
        first = max(8, -(-levels // 8) * 8)
        divergences = {e: naive_divergence(h, e, levels) for e in range(first, 513, 8)}
        assert divergences[int(end)] == pytest.approx(min(divergences.values()), rel=1e-9)


def test_kl_levels_may_differ_between_channels():
    counts = torch.histc(torch.randn(20_000).abs(), 512).double().repeat(2, 1)
    both = kl_threshold(counts, torch.tensor([8, 100]))
    assert both.tolist() == [int(kl_threshold(counts[:1], torch.tensor([n]))) for n in (8, 100)]


def test_bins_of_empty_columns_are_dropped():
    bins = filled([torch.tensor([[1.0, 1.0, -2.0]])]).bins(torch.tensor([-2.0]), torch.tensor([1.0]))
    assert isinstance(bins, Bins) and bins.count.tolist() == [[1, 2]]
