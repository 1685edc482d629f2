"""awq and hqq against brute force; scales are folded where the float model does not notice."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from test_solvers import problem, spec_of
from test_walk import digest, tiny, tokens
from torch import nn

from sparsebit import llm
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.llm.models.blocks import linears_of
from sparsebit.llm.transforms.smooth import Feeders, fold, norm_offset, row_maps
from sparsebit.llm.walk.capture import Call, capture
from sparsebit.llm.walk.lane import Lane
from sparsebit.llm.walk.statistics import sharing
from sparsebit.numeric.solvers.awq import awq, awq_scales
from sparsebit.numeric.solvers.gptq import Statistics
from sparsebit.numeric.solvers.hqq import hqq, shrink
from sparsebit.numeric.solvers.rtn import rtn


# -- awq: the pure functions -----------------------------------------------------------------------------------
def output_gap(weight, x, scales, spec, clip="mse"):
    """The error of a layer whose inputs are divided by `scales`, by running it."""
    q = rtn(weight * scales, x.square().sum(0) / scales**2, spec, clip=clip)
    return float(((x / scales) @ q.dequantize().T - x @ weight.T).double().square().sum())


@pytest.mark.parametrize(("bits", "symmetric", "group"), [(3, True, None), (4, False, 8), (2, True, 16)])
def test_awq_scales_win_where_a_few_inputs_are_large(bits, symmetric, group):
    """Independent inputs, two of them large: their weights must be rounded more finely than the others."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 32, generator=generator), torch.randn(256, 32, generator=generator)
    x[:, [5, 20]] *= 30
    spec = spec_of(bits, symmetric, group)
    scales = awq_scales([weight], Statistics(x.T @ x, None, len(x)), [spec], clip="minmax")
    gap, plain = (output_gap(weight, x, s, spec, "minmax") for s in (scales, torch.ones(32)))
    assert gap < 0.7 * plain
    assert set(scales.topk(2).indices.tolist()) == {5, 20}


def test_awq_scales_come_close_to_the_best_power():
    """A scan of exponents by running the layer, without the second formula."""
    weight, x = problem(inputs=16)
    spec = spec_of(3, True, None)
    found = awq_scales([weight], Statistics(x.T @ x, None, len(x)), [spec], points=20)
    size = x.square().mean(0).sqrt().clamp(min=1e-4)
    scan = min(output_gap(weight, x, size**a, spec) for a in torch.linspace(0, 1, 101).tolist())
    assert output_gap(weight, x, found, spec) <= 1.2 * scan


def test_awq_scales_never_lose_to_none():
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        weight, x = torch.randn(4, 8, generator=generator), torch.randn(64, 8, generator=generator)
        spec = spec_of(4, False, 4)
        scales = awq_scales([weight], Statistics(x.T @ x, None, 64), [spec])
        gap, plain = (output_gap(weight, x, s, spec) for s in (scales, torch.ones(8)))
        assert gap <= plain * (1 + 1e-4)


def test_tied_channels_get_one_scale():
    weight, x = problem(inputs=16)
    x[:, 2] *= 20
    tie = torch.arange(16) % 4
    scales = awq_scales([weight], Statistics(x.T @ x, None, len(x)), [spec_of(3, True, None)], tie)
    assert len(set(scales.tolist())) > 1
    assert all(len(set(scales[tie == k].tolist())) == 1 for k in range(4))
    with pytest.raises(ConfigError, match="points"):
        awq_scales([weight], Statistics(x.T @ x, None, 1), [spec_of(3, True, None)], points=0)


def test_awq_clips_by_the_inputs():
    weight, x = problem()
    q = awq(weight, Statistics(x.T @ x, None, len(x)), spec_of(3, True, 8))
    other = rtn(weight, x.square().sum(0), spec_of(3, True, 8), clip="mse")
    assert torch.equal(q.codes, other.codes) and torch.equal(q.scales, other.scales)


# -- hqq ---------------------------------------------------------------------------------------------------------
def cost(weight, q, p=0.7):
    return (weight - q.dequantize()).abs().pow(p).sum(1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [None, 8, 12])
def test_hqq_never_loses_to_minmax(bits, symmetric, group):
    weight = torch.randn(40, 32) * torch.rand(40, 1) * 0.01
    weight[:, 0] *= 6
    spec = spec_of(bits, symmetric, group)
    found, plain = hqq(weight, None, spec), rtn(weight, None, spec, clip="minmax")
    assert (cost(weight, found) <= cost(weight, plain) * (1 + 1e-5)).all()
    assert cost(weight, found).sum() < 0.98 * cost(weight, plain).sum()


def test_hqq_against_brute_force():
    """All zeros and 400 scales of tiny rows: the iteration goes a good part of the way from min-max to the best."""
    torch.manual_seed(1)
    weight = torch.randn(12, 16)
    spec = spec_of(2, False, None)
    found = cost(weight, hqq(weight, None, spec, scale_dtype=torch.float32)).sum()
    start = cost(weight, rtn(weight, None, spec, clip="minmax", scale_dtype=torch.float32)).sum()
    best = 0.0
    for row in weight:
        span = float(row.amax() - row.amin())
        best += min(
            float((row - ((row / s).round().add(z).clamp(0, 3) - z) * s).abs().pow(0.7).sum())
            for z in range(4)
            for s in torch.linspace(0.05, 0.5, 400).mul(span).tolist()
        )
    assert best * (1 - 1e-4) <= found <= best + 0.7 * (start - best)


def test_hqq_options_and_shrinkage():
    x = torch.tensor([-2.0, -0.01, 0.0, 0.01, 2.0])
    assert shrink(x, 1.0, 1.0).tolist() == [-1.0, 0.0, 0.0, 0.0, 1.0]  # p = 1 is the soft threshold
    with pytest.raises(ConfigError, match=r"must be in \(0, 2\]"):
        hqq(torch.randn(2, 4), None, spec_of(4, True, None), p=0.0)
    assert hqq(torch.zeros(2, 4), None, spec_of(4, False, None)).dequantize().eq(0).all()


# -- where scales go -----------------------------------------------------------------------------------------------
def feeders_of(block, groups, x):
    return Feeders().find(block, groups, Call((None,), {}, 0), x)


def test_scales_find_their_place_in_a_llama():
    model = tiny()
    captured = capture(model, model.layers, tokens(1), copy.deepcopy(model.layers[0]))
    block, call, hidden = copy.deepcopy(model.layers[0]), captured.calls[0][0], captured.hidden[0]
    groups = sharing(Lane(block, [call], [hidden]), linears_of(block))
    found = Feeders().find(block, groups, call, hidden)
    assert [f.name for f in found] == ["norm1", "attention.v", "norm2", "up"]
    # two query heads share one of keys and values: 8 channels each
    assert found[1].rows.tolist() == [*range(8), *range(8), *range(8, 16), *range(8, 16)]
    expected = call.run(block, hidden)
    for group, feeder in zip(groups, found):
        width = block.get_submodule(group[0]).in_features
        scales = torch.rand(width) + 0.5
        scales = scales if feeder.rows is None else scales[feeder.rows]
        before = block.get_submodule(group[0]).weight.clone()
        fold(block, feeder, group, scales)
        torch.testing.assert_close(block.get_submodule(group[0]).weight, before * scales)
    torch.testing.assert_close(call.run(block, hidden), expected, rtol=1e-4, atol=1e-5)


class Ending(nn.Module):
    """up, a function, down: only some functions let scales through."""

    def __init__(self, function, read_twice=False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.function, self.read_twice = function, read_twice

    def forward(self, x):
        y = self.norm(x)
        return self.down(self.function(self.up(y))) + (y if self.read_twice else x)


def test_scales_are_refused_where_the_output_would_change():
    x = torch.randn(2, 5, 16)
    groups = [["up"], ["down"]]
    names = [f and f.name for f in feeders_of(Ending(F.relu), groups, x)]
    assert names == ["norm", "up"]
    assert [f and f.name for f in feeders_of(Ending(F.gelu), groups, x)] == ["norm", None]
    assert [f and f.name for f in feeders_of(Ending(F.relu, True), groups, x)] == [None, "up"]


def test_norms_that_add_one():
    class Gemma(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, x):
            return x / x.square().mean(-1, keepdim=True).sqrt() * (1 + self.weight)

    assert norm_offset(Gemma()) == 1.0 and norm_offset(nn.LayerNorm(8)) == 0.0


def test_rows_of_fused_layers():
    assert next(m.tolist() for m in row_maps(8, 4, [2])) == [4, 5, 6, 7]  # gate and up in one
    assert [0, 1, 0, 1, 2, 3, 2, 3] in [m.tolist() for m in row_maps(4, 8, [2])]  # heads that are shared
    assert [12, 13, 12, 13, 14, 15, 14, 15] in [m.tolist() for m in row_maps(16, 8, [2])]  # q, k, v in one
    assert [4, 5, 10, 11] in [m.tolist() for m in row_maps(12, 4, [2])]  # head by head


# -- the whole job -----------------------------------------------------------------------------------------------
def test_awq_is_saved_as_a_plain_checkpoint_and_beats_rounding(tmp_path):
    model, batches = tiny(), tokens(8, 4, 32)
    with torch.no_grad():
        model.layers[0].norm1.weight[:3] *= 12
        model.layers[1].norm2.weight[4] *= 20
    expected = torch.cat([model(b) for b in batches])
    error = {}
    for method in ("rtn", "awq"):
        out = tmp_path / method
        report = llm.quantize(model, batches, save=out, method=method, bits=3, group_size=16)
        with torch.no_grad():
            loaded = llm.load(out, model)
            error[method] = float((torch.cat([loaded(b) for b in batches]) - expected).square().mean())
    assert error["awq"] < 0.85 * error["rtn"]
    assert report.layers["layers.0.attention.q"]["scales_in"] == "layers.0.norm1"
    assert not torch.equal(loaded.layers[0].norm1.weight, model.layers[0].norm1.weight)


@pytest.mark.parametrize("method", ["awq", "hqq"])
def test_an_interrupted_run_ends_in_the_same_bytes(tmp_path, monkeypatch, method):
    from sparsebit.llm.checkpoints import store

    options = {"method": method, "bits": 3, "group_size": 16}
    llm.quantize(tiny(), tokens(), save=tmp_path / "whole", **options)
    original = store.Store.write
    monkeypatch.setattr(
        store.Store, "write", lambda self, i, *rest: original(self, i, *rest) if i < 2 else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        llm.quantize(tiny(), tokens(), save=tmp_path / "parts", **options)
    monkeypatch.undo()
    llm.quantize(tiny(), tokens(), save=tmp_path / "parts", **options)
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


def test_options_of_both_halves(tmp_path):
    with pytest.raises(CalibrationError, match="awq needs calibration data"):
        llm.quantize(tiny(), save=tmp_path / "a", method="awq")
    with pytest.raises(ConfigError, match="awq has no such option; it has: clip, points"):
        llm.quantize(tiny(), tokens(), save=tmp_path / "b", method="awq", grid=3)
    llm.quantize(tiny(), tokens(), save=tmp_path / "c", method="awq", points=3, clip="minmax", group_size=16)
    llm.quantize(tiny(), save=tmp_path / "d", method="hqq", p=0.5, group_size=16)
