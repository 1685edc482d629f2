"""Whole networks as people write them, in a plain session: a YOLO with C2f, SiLU and DFL, and a segmentation net."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from detectors import Segmenter, Yolo

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


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
