"""rtn, gptq and refine against brute force and against a slow textbook version that shares no code with them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebit.errors import ConfigError
from sparsebit.numeric.kernels import use_native
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.solvers.gptq import Statistics, damped, gptq, output_error, target_of
from sparsebit.numeric.solvers.refine import best_codes, best_scales
from sparsebit.numeric.solvers.rtn import rtn
from sparsebit.numeric.spec import QuantSpec

SCHEMES = [
    (bits, symmetric, group)
    for bits in (2, 3, 4, 8)
    for symmetric in (True, False)
    for group in (None, 8, 16, 12)
]


def spec_of(bits: int, symmetric: bool, group: int | None) -> QuantSpec:
    return QuantSpec(bits=bits, symmetric=symmetric, axis=0, group=group)


def problem(rows=6, inputs=32, tokens=200, seed=0, dtype=torch.float32):
    """A weight and correlated inputs, some of them large, one always zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, inputs, generator=generator, dtype=dtype)
    mixing = torch.randn(inputs, inputs, generator=generator, dtype=dtype)
    x = torch.randn(tokens, inputs, generator=generator, dtype=dtype) @ mixing
    x *= torch.rand(inputs, generator=generator, dtype=dtype) * 3
    x[:, 3] = 0
    return weight, x


# -- round to nearest ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("bits", "symmetric", "group"), SCHEMES)
def test_rtn_minmax_is_the_textbook_formula(bits, symmetric, group):
    weight, _ = problem(inputs=32)
    q = rtn(weight, None, spec_of(bits, symmetric, group), clip="minmax", scale_dtype=torch.float32)
    step = group or 32
    for row in range(weight.shape[0]):
        for g, start in enumerate(range(0, 32, step)):
            values = weight[row, start : start + step].tolist()
            low, high = min(0.0, *values), max(0.0, *values)
            if symmetric:
                high = max(high, -low)
                low = -high
            scale = (high - low) / (2**bits - 1)
            zero = 2 ** (bits - 1) if symmetric else round(-low / scale)
            assert q.scales[row, g].item() == pytest.approx(scale, rel=1e-6)
            assert q.zeros[row, g].item() == zero
            for j, value in enumerate(values):
                code = min(max(round(value / scale) + zero, 0), 2**bits - 1)
                assert abs(q.codes[row, start + j].item() - code) <= (
                    0 if abs(value / scale % 1 - 0.5) > 1e-4 else 1
                )


@pytest.mark.parametrize(("bits", "symmetric", "group"), SCHEMES)
def test_mse_clip_never_loses_to_minmax(bits, symmetric, group):
    weight, x = problem()
    importance = x.square().sum(0)
    spec = spec_of(bits, symmetric, group)
    for weighing in (None, importance):
        error = {
            clip: (
                (rtn(weight, weighing, spec, clip=clip).dequantize() - weight).square()
                * (1.0 if weighing is None else weighing)
            ).sum(1)
            for clip in ("mse", "minmax")
        }
        assert (error["mse"] <= error["minmax"] * (1 + 1e-5)).all()
    if bits <= 3:
        assert error["mse"].sum() < 0.95 * error["minmax"].sum()


def test_scales_are_what_their_dtype_holds_and_never_zero():
    weight = torch.tensor([[1e-9, -2e-9, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1e4, -1e4, 3.0, 0.0]])
    for symmetric, dtype in itertools.product((True, False), (torch.float16, torch.bfloat16, torch.float32)):
        q = rtn(weight, None, spec_of(4, symmetric, None), scale_dtype=dtype)
        assert q.scales.dtype == dtype and (q.scales > 0).all() and torch.isfinite(q.scales).all()
        assert torch.isfinite(q.dequantize()).all()
        assert (q.dequantize()[1] == 0).all()
        assert (q.dequantize() - weight).abs().max() <= 1e4 / 7


def test_a_last_group_that_is_not_full_has_its_own_grid():
    weight = torch.cat([torch.randn(4, 16) * 100, torch.randn(4, 4)], 1)
    q = rtn(weight, None, spec_of(8, True, 16))
    assert q.scales.shape == (4, 2)
    assert (q.dequantize()[:, 16:] - weight[:, 16:]).abs().max() < 0.03


# -- GPTQ -----------------------------------------------------------------------------------------------------
def textbook(weight, h, spec, order, g_idx, grids):
    """Optimal brain quantization in a fixed order: the inverse Hessian shrinks by one input per step. No Cholesky,
    no blocks. `grids(g, current weights of group g)` gives (scale, zero) per row when the group is first met."""
    w, inverse = weight.double().clone(), torch.linalg.inv(h.double())
    codes, known = torch.zeros_like(w), {}
    left = list(range(w.shape[1]))
    for j in order:
        g = int(g_idx[j])
        if g not in known:
            known[g] = grids(g, w)
        scale, zero = (t.double() for t in known[g])
        codes[:, j] = ((w[:, j] / scale).round() + zero).clamp(0, 2**spec.bits - 1)
        error = (w[:, j] - (codes[:, j] - zero) * scale) / inverse[j, j]
        left.remove(j)
        for k in left:
            w[:, k] -= error * inverse[j, k]
        inverse = inverse - inverse[:, [j]] @ inverse[[j], :] / inverse[j, j]
    return codes, known


@pytest.mark.parametrize(("bits", "symmetric", "group"), [s for s in SCHEMES if s[0] in (3, 4)])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("static_groups", [False, True])
def test_gptq_equals_the_textbook(bits, symmetric, group, act_order, static_groups, monkeypatch):
    monkeypatch.setattr("sparsebit.numeric.solvers.gptq.BLOCK", 16)  # several blocks in a small matrix
    monkeypatch.setattr(
        "sparsebit.numeric.solvers.gptq.better_rows", lambda w, h, a, *rest: a
    )  # the greedy pass alone
    weight, x = problem(rows=5, inputs=40, dtype=torch.float64)
    spec, h = spec_of(bits, symmetric, group), x.T @ x
    options = {"clip": "minmax", "scale_dtype": torch.float32}
    q = gptq(
        weight, Statistics(h), spec, act_order=act_order, static_groups=static_groups, refine=0, **options
    )

    d = damped(h, 0.01, 40)
    order = d.diagonal().argsort(descending=True, stable=True).tolist() if act_order else list(range(40))
    size = group or 40
    follow = act_order and not static_groups and group is not None
    g_idx = torch.empty(40, dtype=torch.long)
    for position, j in enumerate(order if follow else range(40)):
        g_idx[j] = position // size
    static = rtn(weight, None, spec, **options)

    def grids(g, current):
        if static_groups or group is None:
            return static.scales[:, g], static.zeros[:, g]
        fresh = rtn(current[:, g_idx == g], None, spec_of(bits, symmetric, None), **options)
        return fresh.scales[:, 0], fresh.zeros[:, 0]

    codes, known = textbook(weight, d, spec, order, g_idx, grids)
    assert torch.equal(q.groups, g_idx)
    assert (q.g_idx is not None) == follow
    same = (q.codes.double() == codes).double().mean()
    assert same == 1.0, f"{1 - same:.1%} of the codes differ"
    for g, (scale, zero) in known.items():
        torch.testing.assert_close(q.scales[:, g], scale.float(), rtol=1e-4, atol=0)
        assert torch.equal(q.zeros[:, g], zero)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scheme=st.sampled_from(SCHEMES),
    act_order=st.booleans(),
    static_groups=st.booleans(),
    refine=st.sampled_from([0, 2]),
)
def test_gptq_is_never_worse_than_rounding(seed, scheme, act_order, static_groups, refine):
    weight, x = problem(seed=seed, tokens=20 + seed % 100)
    spec, h = spec_of(*scheme), x.T @ x
    q = gptq(weight, Statistics(h), spec, act_order=act_order, static_groups=static_groups, refine=refine)
    d = damped(h, 0.01, 32)
    plain = rtn(weight, d.diagonal().float(), spec, g_idx=q.g_idx)
    assert (output_error(weight, d, q) <= output_error(weight, d, plain) * (1 + 1e-4)).all()


def test_gptq_halves_the_error_of_rounding_on_correlated_inputs():
    weight, x = problem(rows=64, inputs=64, tokens=2000)
    h = x.T @ x
    spec = spec_of(3, True, 16)
    plain, found = rtn(weight, x.square().sum(0), spec), gptq(weight, Statistics(h), spec, refine=0)
    polished = gptq(weight, Statistics(h), spec, refine=2)
    true = [((x @ (q.dequantize() - weight).T).square().sum()).item() for q in (plain, found, polished)]
    assert true[1] < 0.52 * true[0] and true[2] < 0.95 * true[1], true


def test_against_brute_force_on_a_tiny_problem():
    """All 4^6 code vectors of six 2-bit weights: never below the optimum, and after polishing near it."""
    gaps = []
    for seed in range(20):
        weight, x = problem(rows=1, inputs=6, tokens=40, seed=seed)
        d = damped(x.T @ x, 0.01, 6)
        q = gptq(weight, Statistics(x.T @ x), spec_of(2, False, None), refine=0, scale_dtype=torch.float32)
        codes = torch.tensor(list(itertools.product(range(4), repeat=6)))
        gap = weight.double() - (codes.double() - q.zeros.double()) * q.scales.double()
        best = ((gap @ d) * gap).sum(1).min().item()
        polished = QuantizedWeight(best_codes(weight, d.float(), q), q.scales, q.zeros, 2, False)
        errors = [output_error(weight, d, s).item() for s in (q, polished)]
        assert best <= errors[1] * (1 + 1e-5) and errors[1] <= errors[0] * (1 + 1e-5)
        gaps.append(errors[1] / best)
    assert sorted(gaps)[10] < 1.02, gaps


@pytest.mark.parametrize("group", [None, 8, 12])
def test_best_scales_are_the_least_squares_solution(group):
    weight, x = problem(rows=4, inputs=32)
    d = damped(x.T @ x, 0.01, 32)
    q = rtn(weight, None, spec_of(3, False, group), scale_dtype=torch.float32)
    scales = best_scales(weight, d.float(), q)
    root = torch.linalg.cholesky(d).T  # d = root^T root
    for row in range(4):
        levels = q.codes[row].double() - q.zeros[row].double()[q.groups]
        columns = [root @ torch.where(q.groups == g, levels, 0.0) for g in range(q.scales.shape[1])]
        reference = torch.linalg.lstsq(
            torch.stack(columns, 1), (root @ weight[row].double())[:, None]
        ).solution
        torch.testing.assert_close(scales[row].double(), reference[:, 0], rtol=2e-3, atol=1e-4)


def test_cross_fits_the_float_layers_output():
    """The target of inputs that are already wrong is the regression of the right outputs on them."""
    weight, x_float = problem(rows=5, inputs=12, tokens=300, dtype=torch.float64)
    x_float[:, 3] = torch.randn(300, dtype=torch.float64)
    x = x_float + 0.3 * torch.randn_like(x_float)
    statistics = Statistics(x.T @ x, (x_float - x).T @ x)
    target = target_of(weight, statistics, damped(statistics.hessian, 1e-9, 12))
    reference = torch.linalg.lstsq(x, x_float @ weight.T).solution.T
    torch.testing.assert_close(target.double(), reference, rtol=1e-4, atol=1e-4)
    q = gptq(weight, statistics, spec_of(4, True, None))
    naive = gptq(weight, Statistics(statistics.hessian), spec_of(4, True, None))
    error = [(x_float @ weight.T - x @ s.dequantize(torch.float64).T).square().sum() for s in (q, naive)]
    assert error[0] < error[1]


def test_what_cannot_be_solved_says_why():
    weight, x = problem()
    with pytest.raises(ConfigError, match="bits"):
        rtn(weight, None, spec_of(5, True, None))
    with pytest.raises(ConfigError, match="32 inputs"):
        gptq(weight, Statistics(torch.eye(8)), spec_of(4, True, None))
    with pytest.raises(ConfigError, match="damping"):
        gptq(weight, Statistics(x.T @ x), spec_of(4, True, None), damping=0.0)
    with pytest.raises(ConfigError, match="NaN"):
        rtn(weight * float("nan"), None, spec_of(4, True, None))
    with pytest.raises(ConfigError, match="calibration data"):
        gptq(weight, Statistics(torch.full((32, 32), float("nan"))), spec_of(4, True, None))
    with pytest.raises(ConfigError, match="clip"):
        rtn(weight, None, spec_of(4, True, None), clip="best")


def test_no_inputs_at_all_is_rounding():
    weight, _ = problem()
    q = gptq(weight, Statistics(torch.zeros(32, 32)), spec_of(4, True, 8), refine=0)
    assert torch.isfinite(q.dequantize()).all()
    assert torch.equal(q.codes, rtn(weight, torch.ones(32), spec_of(4, True, 8)).codes)


@pytest.mark.parametrize(("bits", "symmetric", "group"), SCHEMES)
@pytest.mark.parametrize("act_order", [False, True])
def test_native_loops_and_torch_agree(bits, symmetric, group, act_order):
    """Sums are rounded in another order: a code on the edge between two may be the other one."""
    weight, x = problem(rows=70, inputs=160, tokens=400)
    statistics, spec = Statistics(x.T @ x), spec_of(bits, symmetric, group)
    found = []
    for native in (True, False):
        use_native(native)
        try:
            found.append(gptq(weight, statistics, spec, act_order=act_order))
        finally:
            use_native(True)
    a, b = found
    assert (a.codes != b.codes).double().mean() < 2e-3
    assert (a.scales != b.scales).double().mean() < 0.05
    d = damped(x.T @ x, 0.01, 160)
    torch.testing.assert_close(output_error(weight, d, a), output_error(weight, d, b), rtol=0.02, atol=0)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_two_symmetric_bits_are_as_good_as_asymmetric_ones(method):
    """Groups whose weights lean to one side; without negative scales the symmetric error is 1.5 times the other."""
    from sparsebit.llm.methods import METHODS

    weight, x = problem(rows=64, inputs=64, tokens=2000)
    weight = weight.sign() * weight.abs() ** 1.5 + 0.3 * weight.abs()
    h, errors = x.T @ x, []
    for symmetric in (True, False):
        q = METHODS[method](
            weight, Statistics(h, None, 2000), spec_of(2, symmetric, 16), scale_dtype=torch.float16
        )
        errors.append(float(output_error(weight, h, q).sum()))
        assert bool((q.scales < 0).any()) == symmetric
    assert errors[0] < 1.15 * errors[1], errors


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("native", [True, False])
def test_zero_points_never_lose_against_symmetric_grids(bits, native, monkeypatch):
    """Their grids hold all levels of symmetric ones, with the odd level on either side."""
    from sparsebit.numeric.kernels import columns

    if not native:
        monkeypatch.setattr(columns, "library_for", lambda w: None)
    weight, _ = problem(rows=64, inputs=64, tokens=200)
    errors = []
    for symmetric in (True, False):
        q = rtn(weight, None, spec_of(bits, symmetric, 16))
        errors.append((weight - q.dequantize()).unflatten(1, (-1, 16)).square().sum(-1))
    assert bool((errors[1] <= errors[0] * (1 + 1e-5)).all())
    assert float(errors[1].sum()) < float(errors[0].sum())
