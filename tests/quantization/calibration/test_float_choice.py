"""Attention with many keys: its small probabilities need float; and the samples that such choices are measured on."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsebit
from sparsebit import QuantConfig
from sparsebit.graph.run.calls import Call
from sparsebit.quantization.calibration.float_choice import ATTENTION_NOTE
from sparsebit.quantization.calibration.samples import ENOUGH, Samples, rows_of


class Attention(nn.Module):
    """`sharp` heads look at one key, the others at all of them."""

    def __init__(self, kind: str, width: int = 32):
        super().__init__()
        self.kind = kind
        self.block = nn.MultiheadAttention(width, 2, batch_first=True) if kind == "module" else None
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        scale = torch.tensor([60.0] * (width // 2) + [0.01] * (width // 2))  # the first head is sharp
        with torch.no_grad():
            if self.block is not None:
                self.block.in_proj_weight[:width] *= scale[:, None]
                self.block.in_proj_bias[2 * width :].uniform_()
            else:
                self.qkv.weight[:width] *= scale[:, None]

    def forward(self, x):
        if self.block is not None:
            return self.out(self.block(x, x, x, need_weights=False)[0])
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        if self.kind == "function":
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            weights = (q @ k.transpose(-2, -1) / 4).softmax(-1)
            y = F.dropout(weights, 0.1, self.training) @ v
        return self.out(y.transpose(1, 2).flatten(2))


def sqnr(model, qmodel, x):
    with torch.no_grad():
        wanted, found = model(x), qmodel(x)
    return float(10 * torch.log10((wanted - wanted.mean()).square().sum() / (wanted - found).square().sum()))


def quantized(kind: str, keys: int, **schedule: bool):
    torch.manual_seed(0)
    model, data = Attention(kind).eval(), [torch.randn(2, keys, 32) for _ in range(6)]
    config = QuantConfig.load("w8a8")
    for key, value in schedule.items():
        config = config.override(f"SCHEDULE.{key}", value)
    return model, sparsebit.quantize(model, data, config, progress=False), data


@pytest.mark.parametrize("kind", ["module", "function", "written"])
def test_many_keys_get_float_probabilities(kind, tmp_path):
    model, qmodel, data = quantized(kind, 700)
    _, integer, _ = quantized(kind, 700, FLOAT_FORMS=False)
    x = torch.randn(2, 700, 32)
    assert ATTENTION_NOTE in qmodel.model.meta and ATTENTION_NOTE not in integer.model.meta
    assert sqnr(model, qmodel, x) > sqnr(model, integer, x) + 1.5
    report = qmodel.export_onnx(data[0], str(tmp_path / "m.onnx"), ["x"], batches=data[1:2])
    assert report.ok
    assert any("in float" in note for note in report.notes)


def test_few_keys_stay_integer():
    _, qmodel, _ = quantized("function", 8)
    assert ATTENTION_NOTE not in qmodel.model.meta


@pytest.mark.parametrize("rows, batches", [(1, 3), (1, 100), (3, 50), (32, 7), (8, 1)])
def test_samples_come_from_the_whole_of_the_data(rows, batches):
    samples = Samples()
    for i in range(batches):
        samples.see(Call((torch.full((rows, 2), float(i)),), {}))
    kept = [int(call.args[0][0, 0]) for call in samples.calls]
    total = sum(rows_of(call) for call in samples.calls)
    assert kept[0] == 0
    assert min(ENOUGH, rows * batches) <= total < max(2 * ENOUGH, 2 * rows)
    assert kept[-1] >= batches // 2 or rows * batches <= ENOUGH or rows >= ENOUGH
    steps = {b - a for a, b in itertools.pairwise(kept)}
    assert len(steps) <= 1  # evenly spread
