"""Weights and activations in 8 bits: the formula, the format, and what transformers computes from the same files."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_walk import tiny, tokens

from sparsebit import llm
from sparsebit.errors import ConfigError
from sparsebit.llm.formats import format_of
from sparsebit.llm.formats.int_quantized import IntQuantized
from sparsebit.llm.layers.int8 import Int8Linear
from sparsebit.numeric.solvers.rtn import rtn
from sparsebit.numeric.solvers.smoothquant import PeakStatistics, round_tokens, smooth_scales
from sparsebit.numeric.spec import QuantSpec

SPEC = QuantSpec(8, True, 0)


def test_scales_are_the_formula():
    weights, x = [torch.randn(5, 6), torch.randn(3, 6)], torch.randn(40, 6) * torch.rand(6) * 9
    seen = PeakStatistics(x.T @ x, None, 40, x.abs().amax(0))
    found = smooth_scales(weights, seen, [SPEC, SPEC], alpha=0.7)
    by_hand = torch.tensor(
        [
            max(abs(float(v)) for v in x[:, j]) ** 0.7
            / max(abs(float(v)) for w in weights for v in w[:, j]) ** 0.3
            for j in range(6)
        ]
    )
    torch.testing.assert_close(found / found[0], by_hand / by_hand[0])  # a common factor changes nothing
    with pytest.raises(ConfigError, match="alpha"):
        smooth_scales(weights, seen, [SPEC, SPEC], alpha=2.0)


def test_the_layer_computes_the_integer_product():
    weight, x, bias = torch.randn(6, 16), torch.randn(2, 3, 16), torch.randn(6)
    q = rtn(weight, None, SPEC, clip="minmax", scale_dtype=torch.float32)
    layer = Int8Linear(q, bias)
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    integers = (x / scale).round().clamp(-128, 127).long()
    product = integers @ (q.codes.long() - 128).T  # exact
    torch.testing.assert_close(layer(x), product * scale * q.scales[:, 0] + bias, rtol=1e-5, atol=1e-5)
    assert (layer(x) - F.linear(x, weight, bias)).abs().max() < 0.2
    assert round_tokens(torch.zeros(2, 4)).eq(0).all() and "activations=8" in repr(layer)
    x.requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, q.dequantize().sum(0).expand(2, 3, -1), rtol=1e-4, atol=1e-4)


def test_large_activations_are_smoothed_away(tmp_path):
    model, batches = tiny(), tokens(4)
    for layer in model.layers:  # one channel that is a hundred times as large leaves nothing for the others
        for norm, readers in ((layer.norm1, (layer.attention.q, layer.attention.k, layer.attention.v)),
                              (layer.norm2, (layer.gate, layer.up))):  # fmt: skip
            norm.weight.data[5] *= 100
            for linear in readers:
                linear.weight.data[:, 5] /= 100
    expected = model(batches[0])
    error = {}
    for alpha in (0.0, 0.5):
        out = tmp_path / str(alpha)
        report = llm.quantize(model, batches, save=out, method="smoothquant", alpha=alpha)
        loaded = llm.load(out, model)
        with torch.no_grad():
            error[alpha] = float((loaded(batches[0]) - expected).square().mean() / expected.square().mean())
    assert report.average_bits == 8 and isinstance(loaded.layers[0].gate, Int8Linear)
    assert report.layers["layers.2.gate"]["scales_in"] == "layers.2.norm2"
    rounded = tmp_path / "rounded"
    llm.quantize(model, save=rounded, method="rtn", bits=8, group_size=-1, format="int-quantized")
    plain = float(
        (llm.load(rounded, model)(batches[0]) - expected).square().mean() / expected.square().mean()
    )
    assert error[0.5] < 2e-3 and error[0.5] < 0.1 * plain


def test_what_the_format_does_not_hold_is_refused(tmp_path):
    for wrong in (
        {"bits": 4, "group_size": -1},
        {"bits": 8, "group_size": 16},
        {"symmetric": False, "bits": 8},
    ):
        options = {"group_size": -1, **wrong}
        with pytest.raises(ConfigError, match="holds whole rows of 8 bits without zero points"):
            llm.quantize(tiny(), save=tmp_path / "out", method="rtn", format="int-quantized", **options)
        assert not (tmp_path / "out").exists()  # before the work
    described = IntQuantized().describe({}, [], False)
    assert isinstance(format_of(described), IntQuantized)
    described["config_groups"]["group_0"]["input_activations"]["dynamic"] = False
    with pytest.raises(ConfigError, match="only int8 rows"):
        format_of(described).specs(described, ["a"])
    del described["config_groups"]["group_0"]["input_activations"]
    layout = format_of(described)
    layout.specs(described, ["a"])
    assert not layout.activations
