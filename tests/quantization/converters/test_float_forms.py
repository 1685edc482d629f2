"""Float forms of smooth activations, ranges that end where an activation saturates, convolutions without quantizers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sparsebit
from sparsebit import QuantConfig
from sparsebit.quantization import QuantModel
from sparsebit.quantization.calibration import float_choice
from sparsebit.quantization.calibration.float_choice import GOOD_ENOUGH, NOTE
from sparsebit.quantization.converters.float_forms import float_forms


class Separable(nn.Module):
    """1 x 1, SiLU, depthwise, SiLU, 1 x 1; `spread` makes the channels of the middle values differ in range."""

    def __init__(self, spread: float, width: int = 80) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.expand, self.project = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.head = nn.Linear(width, 10)
        factor = torch.logspace(0, math.log10(spread), width).view(-1, 1, 1, 1)
        with torch.no_grad():
            self.expand.weight *= factor
            self.depthwise.weight /= factor

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.silu(self.depthwise(F.silu(self.expand(x))))
        return self.head(F.relu(self.project(x)).mean((2, 3)))


def quantized(spread: float, **schedule: bool) -> tuple[Separable, QuantModel, list[Tensor]]:
    torch.manual_seed(0)
    model, data = Separable(spread).eval(), [torch.randn(4, 3, 12, 12) for _ in range(3)]
    config = QuantConfig.load("w8a8")
    for key, value in schedule.items():
        config = config.override(f"SCHEDULE.{key}", value)
    return model, sparsebit.quantize(model, data, config, progress=False), data


def sqnr(model: nn.Module, qmodel: QuantModel, x: Tensor) -> float:
    with torch.no_grad():
        wanted, found = model(x), qmodel(x)
    return float(10 * torch.log10((wanted - wanted.mean()).square().sum() / (wanted - found).square().sum()))


@pytest.fixture
def nothing_is_good_enough(monkeypatch):
    monkeypatch.setattr(float_choice, "GOOD_ENOUGH", 100.0)


def test_channels_of_very_different_range_get_the_float_form(tmp_path, nothing_is_good_enough):
    model, qmodel, data = quantized(1e3)
    _, integer, _ = quantized(1e3, FLOAT_FORMS=False)
    x = torch.randn(8, 3, 12, 12)
    assert NOTE in qmodel.model.meta and NOTE not in integer.model.meta
    assert sqnr(model, qmodel, x) > sqnr(model, integer, x) + 6
    assert qmodel.model.depthwise.weight_quantizer.unused
    report = qmodel.export_onnx(data[0], str(tmp_path / "m.onnx"), ["x"], batches=data[1:])
    assert report.ok and report.integer["QGemm"] == 2  # expand, and the Linear
    assert any("in float" in note for note in report.notes)


def test_where_integers_are_good_enough_they_stay(tmp_path):
    model, qmodel, data = quantized(1.0)
    assert sqnr(model, qmodel, data[0]) > GOOD_ENOUGH
    assert float_forms(qmodel.model) and NOTE not in qmodel.model.meta
    assert not qmodel.model.depthwise.weight_quantizer.unused


def test_the_choice_survives_save_and_load(tmp_path, nothing_is_good_enough):
    model, qmodel, data = quantized(1e3)
    qmodel.save(tmp_path / "saved")
    again = QuantModel.load(tmp_path / "saved", model)
    again.set_quant(w_quant=True, a_quant=True)
    assert torch.equal(again(data[0]), qmodel(data[0]))


def test_a_second_calibration_chooses_again(nothing_is_good_enough):
    _, qmodel, data = quantized(1e3)
    assert qmodel.model.depthwise.weight_quantizer.unused
    qmodel.cfg = qmodel.cfg.override("SCHEDULE.FLOAT_FORMS", False)
    qmodel.calibrate(data, progress=False)
    assert not qmodel.model.depthwise.weight_quantizer.unused and NOTE not in qmodel.model.meta


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.Hardswish()])
def test_ranges_end_where_the_activation_is_zero(activation):
    """The inputs reach far below zero; codes for values down there would be lost."""
    torch.manual_seed(0)
    first, last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
    with torch.no_grad():
        first.bias -= 20
        first.weight *= 12
    model = nn.Sequential(first, activation, last, nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    data = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    quantizers = {}
    for trimmed in (True, False):
        config = QuantConfig.load("w8a8").override("SCHEDULE.TRIM_RANGES", trimmed)
        qmodel = sparsebit.quantize(model, data, config, progress=False)
        quantizers[trimmed] = [
            q for name, q in qmodel.named_quantizers() if "mul" in name or "igmoid" in name
        ]
    lows = {key: min(float(q.observer.min_val.min()) for q in found) for key, found in quantizers.items()}
    assert lows[False] < -30 and -8 < lows[True] < 0


def test_a_convolution_between_float_values_is_wholly_float(tmp_path):
    class Block(nn.Module):
        """As in ConvNeXt: depthwise 7 x 7 on the residual stream, then a norm."""

        def __init__(self) -> None:
            super().__init__()
            self.depthwise = nn.Conv2d(16, 16, 7, padding=3, groups=16)
            self.norm, self.wide, self.thin = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
            return x + self.thin(F.gelu(self.wide(y))).permute(0, 3, 1, 2)

    torch.manual_seed(0)
    data = [torch.randn(2, 16, 10, 10) for _ in range(3)]
    qmodel = sparsebit.quantize(Block().eval(), data, progress=False)
    names = [name for name, _ in qmodel.named_quantizers()]
    assert not any(name.startswith("depthwise") for name in names) and any("wide" in name for name in names)
    report = qmodel.export_onnx(data[0], str(tmp_path / "m.onnx"), ["x"], batches=data[1:])
    assert report.ok and report.floating["Conv"] == 1 and "DequantizeLinear" not in report.floating


def test_narrow_groups_are_float_and_their_neighbours_stay_integer(tmp_path):
    """Groups of 4 channels, and two filters for each channel; onnxruntime is slow at both in integers."""
    torch.manual_seed(0)
    narrow = [
        nn.Conv2d(32, 32, 3, padding=1, groups=8),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, groups=32),
    ]
    first, last = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()], [nn.ReLU(), nn.Conv2d(64, 16, 3), nn.ReLU()]
    model = nn.Sequential(*first, *narrow, *last, nn.Flatten(), nn.Linear(1600, 4)).eval()
    data = [torch.randn(2, 3, 12, 12) for _ in range(3)]
    qmodel = sparsebit.quantize(model, data, progress=False)
    report = qmodel.export_onnx(data[0], str(tmp_path / "m.onnx"), ["x"], batches=data[1:])
    assert report.ok and report.integer["QLinearConv"] == 2
    assert report.floating["Conv"] + report.floating["FusedConv"] == 2
