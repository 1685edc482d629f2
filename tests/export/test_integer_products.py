"""Convolutions of 1 x 1 whose output is read in float are integer products with float output; large pools."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import sparsebit


def exported(model: nn.Module, data: list[Tensor], path: Path, **options):
    qmodel = sparsebit.quantize(model.eval(), data, progress=False)
    report = qmodel.export_onnx(data[0], str(path / "m.onnx"), ["x"], batches=data[1:], **options)
    assert report.ok and sum(check.wrong for check in report.certificate.quantizers.values()) == 0
    return qmodel, report


def nodes(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path / "m.onnx").graph.node)


class Heads(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 5, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_is_integer_with_float_output(bias, tmp_path):
    torch.manual_seed(0)
    _, report = exported(Heads(bias), [torch.randn(2, 3, 9, 7) for _ in range(3)], tmp_path)
    assert report.integer["QGemm"] + report.integer["MatMulIntegerToFloat"] == 1
    assert report.integer["QLinearConv"] == 1 and not report.floating.get("Conv")


def test_sizes_may_be_free(tmp_path):
    """The rows of the product are all places of all images, whatever their number."""
    import onnxruntime as ort

    torch.manual_seed(0)
    axes = {"x": {0: "batch", 2: "height", 3: "width"}}
    qmodel, report = exported(
        Heads(), [torch.randn(2, 3, 8, 12) for _ in range(3)], tmp_path, dynamic_axes=axes
    )
    assert report.integer["QGemm"] == 1
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    for shape in ((1, 3, 5, 9), (3, 3, 16, 4)):
        x = torch.randn(shape)
        (found,) = session.run(None, {"x": x.numpy()})
        assert torch.allclose(torch.from_numpy(found), qmodel(x), atol=1e-4)


@pytest.mark.parametrize("other", [{"stride": 2}, {"padding": 1}, {"groups": 2}])
def test_only_plain_ones_become_products(other, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 6, 1, **other))
    _, report = exported(model, [torch.randn(2, 3, 8, 8) for _ in range(3)], tmp_path)
    assert not report.integer["QGemm"]


def test_between_integers_they_stay_convolutions(tmp_path):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 8, 3)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    _, report = exported(model, [torch.randn(2, 3, 8, 8) for _ in range(3)], tmp_path)
    assert report.integer["QLinearConv"] == 3 and report.integer["QGemm"] == 1  # the Linear


def test_a_weight_that_two_convolutions_share_stays_right(tmp_path):
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.body(x).relu()
            return self.head(y), self.head(y[..., ::2, ::2])

    torch.manual_seed(0)
    exported(Shared(), [torch.randn(2, 3, 8, 8) for _ in range(3)], tmp_path)


@pytest.mark.parametrize("channels, expected", [(16, 1), (24, 0)])
def test_a_large_pool_reads_blocked_values(channels, expected, tmp_path):
    """onnxruntime blocks only multiples of 16 channels."""

    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, channels, 3, padding=1)
            self.pool, self.last = nn.MaxPool2d(5, 1, 2), nn.Conv2d(2 * channels, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).relu()
            return self.last(torch.cat([x, self.pool(x)], 1)).relu().mean((2, 3))

    torch.manual_seed(0)
    exported(Pyramid(), [torch.randn(2, 3, 12, 12) for _ in range(3)], tmp_path)
    made = [n for n in onnx.load(tmp_path / "m.onnx").graph.node if n.name.endswith("/blocked")]
    assert len(made) == expected
