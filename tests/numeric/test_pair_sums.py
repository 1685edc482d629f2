"""The pair rule against a simulation of the 16-bit sums of x86 without VNNI."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsebit.numeric import fake_quantize, quantize_to_int
from sparsebit.numeric.pair_sums import breaks_rule, exact_scale, in_sum_order, keep_pairs, needs_rule
from sparsebit.numeric.qparams import qparams_from_minmax
from sparsebit.numeric.spec import QParams, QuantSpec

PER_CHANNEL, PER_TENSOR = QuantSpec(8, True, 0), QuantSpec(8, True)
SHAPES = [
    (16, 8),
    (3, 7),
    (64, 64, 3, 3),
    (32, 3, 7, 7),
    (17, 33, 1, 1),
    (12, 5, 3),
    (6, 4, 2, 3, 3),
    (1, 1, 1, 1),
]


def vpmaddubsw_dot(activations: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """(N, K) uint8 times (C, K) int8, two neighbouring products added in int16 with saturation, then in int32."""
    if codes.shape[1] % 2:
        activations, codes = (np.pad(v, ((0, 0), (0, 1))) for v in (activations, codes))
    products = activations[:, None].astype(np.int32) * codes[None].astype(np.int32)
    pairs = products.reshape(*products.shape[:2], -1, 2).sum(-1)
    return pairs.clip(-32768, 32767).sum(-1)


def weights(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if seed % 2:
        values = values.abs()  # neighbours of one sign: the worst case
    return values * torch.logspace(-3, 1, shape[0]).reshape(-1, *[1] * (len(shape) - 1))


def grid_of(weight: torch.Tensor, spec: QuantSpec) -> QParams:
    rows = weight.flatten(1) if spec.per_channel else weight.reshape(1, -1)
    return qparams_from_minmax(rows.amin(1), rows.amax(1), spec)


def exact_codes(weight: torch.Tensor, qparams: QParams, spec: QuantSpec) -> torch.Tensor:
    """The codes that a weight gets under the rule."""
    rounded = fake_quantize(weight.detach(), qparams, spec)
    return quantize_to_int(keep_pairs(rounded, qparams.scale, spec), qparams, spec).float()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spec", [PER_CHANNEL, PER_TENSOR], ids=["per channel", "per tensor"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_in_16_bits_are_exact(shape, spec, seed):
    weight = weights(shape, seed)
    qparams = grid_of(weight, spec)
    qparams = QParams(exact_scale(weight, qparams, spec), qparams.zero_point)
    codes = exact_codes(weight, qparams, spec)
    assert int(breaks_rule(codes)) == 0
    rng = np.random.default_rng(seed)
    rows = in_sum_order(codes).numpy().astype(np.int8)
    worst = (rows > 0).astype(np.uint8) * 255  # the activations that make the largest sums of every channel
    random = rng.choice(np.array([0, 255], np.uint8), (8, rows.shape[1]), p=[0.2, 0.8])
    given = np.concatenate([worst, 255 - worst, random])
    exact = given.astype(np.int64) @ rows.T.astype(np.int64)
    assert np.array_equal(vpmaddubsw_dot(given, rows), exact)


def test_the_simulation_finds_weights_that_break_the_rule():
    codes = np.full((1, 4), 127, np.int8)
    given = np.full((1, 4), 255, np.uint8)
    assert vpmaddubsw_dot(given, codes)[0, 0] == 2 * 32767 < 4 * 127 * 255


def test_moved_codes_are_the_nearest_that_keep_the_rule():
    """Every pair of codes is tried; the nearest to the rounded values."""
    weight = torch.tensor(
        [[100.2, 90.7], [127.0, 126.0], [-120.0, -60.4], [127.0, -128.0], [64.4, 64.4], [3.0, 2.0]]
    )
    one = QParams(torch.ones(len(weight)), torch.zeros(len(weight)))
    got = exact_codes(weight, one, PER_CHANNEL)
    every = torch.cartesian_prod(torch.arange(-128, 128), torch.arange(-128, 128)).float()
    every = every[every.sum(1).abs() <= 128]
    for row, codes in zip(weight, got):
        least = (every - row.round()).square().sum(1).min()
        assert (codes - row.round()).square().sum() == pytest.approx(float(least), abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_the_scale_is_near_the_best_one(seed):
    weight = weights((24, 16, 3, 3), seed)
    qparams = grid_of(weight, PER_CHANNEL)

    def error(scale: torch.Tensor) -> torch.Tensor:
        codes = exact_codes(weight, QParams(scale, qparams.zero_point), PER_CHANNEL)
        return (codes * scale.reshape(-1, 1, 1, 1) - weight).square().flatten(1).sum(1)

    found = error(exact_scale(weight, qparams, PER_CHANNEL))
    best = torch.stack([error(qparams.scale * f) for f in torch.linspace(1, 2, 40).tolist()]).amin(0)
    assert float((found / best).mean()) < 1.05
    seven = QuantSpec(7, True, 0)
    of_seven_bits = grid_of(weight, seven)
    codes = quantize_to_int(weight, of_seven_bits, seven) * of_seven_bits.scale.reshape(-1, 1, 1, 1)
    assert float(found.sum()) < 0.7 * float(
        (codes - weight).square().sum()
    )  # 7 bits need no rule, and lose more


def test_values_that_keep_the_rule_stay():
    weight = weights((8, 6, 3, 3), 0)
    qparams = QParams(torch.full((8,), 1e3), torch.zeros(8))
    assert keep_pairs(weight, qparams.scale, PER_CHANNEL) is weight
    assert torch.equal(exact_scale(weight, qparams, PER_CHANNEL), qparams.scale)


def test_the_gradient_passes():
    weight = weights((8, 6, 3, 3), 1)
    qparams = grid_of(weight, PER_CHANNEL)
    rounded = fake_quantize(weight, qparams, PER_CHANNEL).requires_grad_()
    kept = keep_pairs(rounded, qparams.scale, PER_CHANNEL)
    assert not torch.equal(kept, rounded)
    kept.sum().backward()
    assert torch.equal(rounded.grad, torch.ones_like(weight))


@pytest.mark.parametrize("bits, expected", [(8, True), (7, False), (4, False)])
def test_which_grids_need_it(bits, expected):
    assert needs_rule(QuantSpec(bits, True, 0)) is expected
