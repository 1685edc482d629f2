"""The predicted time: the sum of measured costs, by hand for a small net, and its order over kinds of networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.quantization.analysis.speed import costs

X = torch.randn(1, 16, 28, 28)


def speed(*layers: nn.Module, config=None, x=X):
    return sparsebit.preflight(nn.Sequential(*layers).eval(), x, config).speed


def microseconds(cpu: str, kind: str, form: str, **features: float) -> float:
    numbers = costs()[cpu]["ops"][kind][form]
    return numbers.get("call", 0) + sum(numbers.get(name, 0) * value for name, value in features.items())


@pytest.mark.parametrize("cpu", ["vnni", "avx2"])
def test_the_sum_of_the_table_by_hand(cpu):
    found = speed(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1))[cpu]
    first = {"products": 28 * 28 * 16 * 32 * 9 / 1e6, "gathered": 28 * 28 * 16 * 9 / 1e6}
    second = {"products": 28 * 28 * 32 * 64 * 9 / 1e6, "gathered": 28 * 28 * 32 * 9 / 1e6}
    values = [28 * 28 * channels / 1e6 for channels in (16, 32, 64)]
    plain = microseconds(cpu, "Conv", "float", **first, values=values[1])
    plain += microseconds(cpu, "Conv", "float", **second, values=values[2])
    assert found.float_ms == pytest.approx(plain / 1000)
    # the last one gives float values, which its kernel in integers cannot
    around = costs()[cpu]["borders"]
    quantized = microseconds(cpu, "Conv", "integer", **first, values=values[1])
    quantized += microseconds(cpu, "Conv", "float", **second, values=values[2])
    quantized += around["QuantizeLinear"]["call"] + around["DequantizeLinear"]["call"]
    quantized += around["QuantizeLinear"]["values"] * values[0]
    quantized += around["DequantizeLinear"]["values"] * values[1]
    assert found.quantized_ms == pytest.approx(quantized / 1000, rel=0.02)


def test_wide_convolutions_gain_and_gates_do_not():
    wide = [layer for _ in range(4) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
    x = torch.randn(1, 64, 28, 28)
    gates = [
        layer for _ in range(4) for layer in (nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.Hardswish())
    ]
    for cpu in ("vnni", "avx2"):
        assert speed(*wide, nn.Conv2d(64, 64, 1), x=x)[cpu].ratio < 0.7
        assert speed(*gates, nn.Conv2d(64, 64, 1), x=x)[cpu].ratio > 1.05
    text = sparsebit.preflight(nn.Sequential(*gates, nn.Conv2d(64, 64, 1)).eval(), x).summary()
    assert "predicted, on one core" in text and "tune=True" in text


def test_other_backends_have_no_prediction():
    assert not speed(nn.Conv2d(16, 8, 1), config={"BACKEND": "virtual"})
    assert not sparsebit.QuantModel(nn.Sequential(nn.Conv2d(16, 8, 1))).preflight().speed
