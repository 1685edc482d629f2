"""OBSERVER.TYPE: auto takes the range with the least error of the layer's output, if the model's outputs agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from sparsebit.quantization.calibration.output_noise import noise
from sparsebit.quantization.calibration.range_choice import PROPOSALS, Grids
from sparsebit.quantization.observers.auto import CANDIDATES

AUTO = {"A": {"OBSERVER": {"TYPE": "auto"}}}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)
    ).eval()


def images(outlier: float, count: int = 6) -> list[Tensor]:
    """Each batch has one value that is far from all others."""
    torch.manual_seed(1)
    batches = [torch.randn(4, 3, 16, 16) for _ in range(count)]
    for batch in batches:
        batch[0, 0, 0, 0] = outlier
    return batches


def error(qmodel: nn.Module, model: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((qmodel(x) - model(x)).square().mean())


def test_a_range_that_cuts_outliers_is_taken_at_low_bits(tmp_path: Path) -> None:
    model, batches = net(), images(outlier=12.0)
    bits = {"QUANTIZER": {"BIT": 3}}
    plain = sparsebit.quantize(
        model, batches, {"A": {"OBSERVER": {"TYPE": "minmax"}, **bits}}, progress=False
    )
    chosen = sparsebit.quantize(model, batches, {"A": {"OBSERVER": {"TYPE": "auto"}, **bits}}, progress=False)
    data = torch.cat(batches)
    assert error(chosen, model, data) < 0.8 * error(plain, model, data)
    report = chosen.export_onnx(batches[0], str(tmp_path / "m.onnx"), ["x"])
    assert any("OBSERVER.TYPE auto" in note for note in report.notes)


def test_each_grid_is_the_candidate_with_the_least_error_of_its_layer() -> None:
    """Beside a search by hand, layer by layer, on the same samples."""
    model, batches = net(), images(outlier=20.0, count=2)
    qmodel = sparsebit.QuantModel(model, AUTO, example=batches[0])
    qmodel.prepare_calibration(asym=False)
    for batch in batches:
        qmodel(batch)
    layers = [m for m in qmodel.model.modules() if getattr(m, "input_quantizer", None) is not None]
    layers = [
        m for m in layers if m.input_quantizer.observer.TYPE == "auto" and not m.input_quantizer.absorbed
    ]
    ranges = [layer.input_quantizer.observer.ranges() for layer in layers]
    qmodel.calc_qparams()
    value = torch.cat(batches)
    best: dict[tuple[str, ...], list[tuple[Tensor, Tensor]]] = {among: [] for among in PROPOSALS}
    with torch.no_grad():
        for layer, own in zip(layers, ranges):
            exact = nn.functional.conv2d(value, layer.weight, layer.bias)
            errors = {}
            for name, (low, high) in own.items():
                scale = (high.clamp(min=0) - low.clamp(max=0)) / 255
                zero = (-low.clamp(max=0) / scale).round()
                rounded = ((value / scale).round() + zero).clamp(0, 255).sub(zero) * scale
                found = nn.functional.conv2d(rounded, layer.weight, layer.bias)
                errors[name] = float((found - exact).double().square().sum())
            for among, found in best.items():
                found.append(own[min((name for name in own if name in among), key=errors.__getitem__)])
            value = exact.relu()
    observers = [layer.input_quantizer.observer for layer in layers]
    taken = [torch.stack([o.min_val, o.max_val]) for o in observers]
    wanted = [[torch.stack(pair) for pair in pairs] for pairs in best.values()]
    assert any(all(torch.equal(a, b) for a, b in zip(taken, pairs)) for pairs in wanted)


def test_equal_ranges_are_one_candidate() -> None:
    qmodel = sparsebit.QuantModel(net(), AUTO)
    quantizer = next(m.input_quantizer for m in qmodel.model.modules() if getattr(m, "input_quantizer", None))
    constant = torch.full((2, 3, 128, 128), 0.5)
    constant[:, :, 0, 0] = -0.5
    quantizer.update_observer(constant)
    assert list(quantizer.observer.ranges()) == list(CANDIDATES)
    names = list(Grids([quantizer], []).candidates)
    assert names[0] == CANDIDATES[0] and "minmax" not in names


def test_samples_of_other_sizes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(1, 3, size, size) for size in (12, 16, 20, 24)]
    qmodel = sparsebit.quantize(net(), batches, AUTO, progress=False)
    report = qmodel.export_onnx(batches[1], str(tmp_path / "m.onnx"), ["x"], batches=batches[1:2])
    assert report.ok


class Tokens(nn.Module):
    """A text model: its output has as many rows as the text has tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(50, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.table(ids)))


def test_texts_of_other_lengths() -> None:
    torch.manual_seed(0)
    batches = [torch.randint(0, 50, (2, length)) for length in (5, 9, 13)]
    qmodel = sparsebit.quantize(Tokens().eval(), batches, AUTO, progress=False)
    assert qmodel(batches[1]).shape == (2, 9, 8)


def test_noise_of_outputs_by_hand() -> None:
    a = torch.tensor([[[1.0, -1.0, 3.0, 5.0], [100.0, 300.0, 100.0, 300.0]]])
    b = a + torch.tensor([[[0.5, 0.0, 0.0, 0.0], [0.0, 10.0, 0.0, 0.0]]])
    shares = [0.25 / 20, 100 / 40000]  # squares of the noise by squares around the mean, for each channel
    assert noise([[a]], [[b]]) == pytest.approx((shares[0] * shares[1]) ** 0.5)
    assert noise([[a.flatten()]], [[b.flatten()]]) == pytest.approx(
        100.25 / float((a - a.mean()).square().sum())
    )
    assert noise([[a]], [[a[:, :1]]]) == 0  # another number of boxes: nothing to compare
    longer = torch.cat([a, a], 1)
    assert noise([[a], [longer]], [[b], [longer]]) > 0
