"""Whole networks as people write them, in a plain session: a YOLO with C2f, SiLU and DFL, and a segmentation net."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsebit

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
BINS = 16


def conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.SiLU())


class C2f(nn.Module):
    """Two halves; one goes through bottlenecks, and every step of it is kept."""

    def __init__(self, channels: int, blocks: int):
        super().__init__()
        half = channels // 2
        self.first, self.last = conv(channels, channels), conv((2 + blocks) * half, channels)
        self.blocks = nn.ModuleList(
            nn.Sequential(conv(half, half, 3), conv(half, half, 3)) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(parts[-1] + block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Yolo(nn.Module):
    """Two scales; boxes are expectations over 16 bins (DFL), scores are logits per class."""

    def __init__(self, classes: int = 4):
        super().__init__()
        self.stem = nn.Sequential(conv(3, 16, 3, 2), conv(16, 32, 3, 2), C2f(32, 2))
        self.down = nn.Sequential(conv(32, 32, 3, 2), C2f(32, 1))
        self.up = C2f(32, 1)
        self.mix = conv(64, 32)
        self.boxes, self.scores = nn.Conv2d(32, 4 * BINS, 1), nn.Conv2d(32, classes, 1)
        self.project = nn.Conv2d(BINS, 1, 1, bias=False)
        self.project.weight.data = torch.arange(BINS, dtype=torch.float).view(1, BINS, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.stem(x)
        coarse = self.down(fine)
        fine = self.up(self.mix(torch.cat([fine, F.interpolate(coarse, scale_factor=2.0)], 1)))
        boxes = torch.cat([self.boxes(f).flatten(2) for f in (fine, coarse)], 2)
        scores = torch.cat([self.scores(f).flatten(2) for f in (fine, coarse)], 2)
        bins = boxes.view(x.shape[0], 4, BINS, -1).transpose(1, 2).softmax(1)
        return self.project(bins).squeeze(1), scores


class Segmenter(nn.Module):
    """An encoder, pooling at two sizes, a decoder that adds what it left behind; a class per pixel."""

    def __init__(self, classes: int = 5):
        super().__init__()
        relu = nn.ReLU()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), relu)
        self.second = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1, groups=2), nn.BatchNorm2d(32), relu)
        self.pooled, self.lateral = nn.Conv2d(32, 32, 1), nn.Conv2d(16, 32, 1)
        self.head = nn.Conv2d(32, classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(first)
        context = F.interpolate(self.pooled(F.adaptive_avg_pool2d(second, 2)), second.shape[-2:])
        joined = self.lateral(first) + F.interpolate(second * context.sigmoid(), scale_factor=2.0)
        return F.interpolate(self.head(joined), scale_factor=2.0, mode="bilinear")


def built(net: nn.Module) -> tuple[nn.Module, list[Tensor]]:
    """The net with batch norms that fit its data."""
    torch.manual_seed(0)
    data = [torch.randn(4, 3, 32, 32) for _ in range(4)]
    net.train()
    for _ in range(20):
        net(torch.cat(data))
    return net.eval(), data


@pytest.mark.parametrize("make", [Yolo, Segmenter])
def test_each_output_is_right_in_a_plain_session(make: type[nn.Module], tmp_path: Path) -> None:
    net, data = built(make())
    qmodel = sparsebit.quantize(net, data[:3], progress=False)
    path = tmp_path / "net.onnx"
    report = qmodel.export_onnx(data[0], str(path), dynamic_axes={"x": {0: "batch"}}, batches=data[3:])
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    got = session.run(None, {"x": data[3].numpy()})
    with torch.no_grad():
        expected, floating = qmodel(data[3]), net(data[3])
    expected = [expected] if isinstance(expected, Tensor) else list(expected)
    floating = [floating] if isinstance(floating, Tensor) else list(floating)
    assert len(got) == len(expected) == len(report.certificate.runtime.outputs)
    for mine, theirs, exact in zip(expected, map(torch.from_numpy, got), floating):
        quantization = (mine - exact).square().mean()
        assert (theirs - mine).square().mean() <= quantization / 4, "the file is further off than rounding"
        assert (theirs - exact).square().mean() <= 2 * quantization


def test_labels_of_pictures_are_on_axis_1(tmp_path: Path) -> None:
    net, data = built(Segmenter())
    qmodel = sparsebit.quantize(net, data, progress=False)
    report = qmodel.export_onnx(data[0], str(tmp_path / "net.onnx"))
    (output,) = report.certificate.runtime.outputs.values()
    assert (output.axis, output.labels) == (1, 4 * 32 * 32)
    assert "classes on axis 1" in str(report)
