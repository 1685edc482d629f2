"""Boxes in pixels and scores in one output: loud boxes hide no wrong scores."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsebit
from sparsebit.errors import ExportError
from sparsebit.export.certificate.parts import parts_of
from sparsebit.export.export_module import export_module
from sparsebit.export.kernels import integer_kernels, why_float
from sparsebit.export.kernels.wrong_kernels import is_wrong

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def test_parts_are_told_by_their_sizes() -> None:
    rng = np.random.default_rng(0)
    boxes, scores = rng.uniform(50, 640, (2, 100, 4)), rng.uniform(0, 1, (2, 100, 20))
    (part,) = parts_of(np.concatenate([boxes, scores], 2).astype(np.float32))
    assert (part.axis, part.places) == (2, tuple(range(4, 24)))
    assert part.name_in("out") == "out[:, :, 4:24]"
    mixed = np.concatenate([boxes[..., :2], scores, boxes[..., 2:]], 2).swapaxes(1, 2).astype(np.float32)
    (part,) = parts_of(mixed)
    assert (part.axis, part.places) == (1, tuple(range(2, 22)))
    assert part.of(mixed).shape == (2, 1, 1, 2000)


@pytest.mark.parametrize(
    "x",
    [
        np.random.default_rng(0).normal(size=(4, 1000)),
        np.arange(12).reshape(3, 4),
        np.zeros((2, 3)),
        np.float64(3.0),
        np.empty((0, 4)),
        np.full((2, 5), np.nan),
    ],
    ids=["logits", "whole", "zeros", "number", "empty", "nan"],
)
def test_what_has_no_parts(x: np.ndarray) -> None:
    assert parts_of(np.asarray(x)) == []


class Head(nn.Module):
    """(batch, anchors, 4 numbers of a box and 20 scores); the boxes are so noisy that 8 bits move them by pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.boxes = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
        self.bins, self.scores = nn.Conv2d(16, 20, 1), nn.Conv2d(20, 20, 1)
        self.scores.weight.data *= 60
        self.bins.weight.data *= 0.1
        self.bins.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        boxes = (1 + torch.sin(30 * self.boxes(x))) * 320
        bins = self.bins(x).transpose(1, 3).softmax(-1).transpose(1, 3)
        scores = self.scores(bins).sigmoid()
        return torch.cat([boxes.flatten(2), scores.flatten(2)], 1).transpose(1, 2)


def made() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return Head().eval(), [torch.randn(2, 3, 16, 16) for _ in range(3)]


def test_the_right_file_is_accepted(tmp_path: Path) -> None:
    model, batches = made()
    qmodel = sparsebit.quantize(model, batches, progress=False)
    report = qmodel.export_onnx(batches[0], str(tmp_path / "m.onnx"), batches=batches[1:])
    (scores,) = report.certificate.runtime.quiet.values()
    assert report.ok and scores.noise_db < -60


@pytest.mark.skipif(not is_wrong("QLinearSoftmax"), reason="this onnxruntime computes it rightly")
def test_a_kernel_that_spoils_the_scores_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values have no name in the file: the first tensor with a name is that of a convolution behind it."""

    passes = importlib.import_module("sparsebit.quantization.converters.fuse_operations.softmax_in_float")
    for module in (integer_kernels, why_float, passes):
        monkeypatch.setattr(module, "is_wrong", lambda kernel: False)
    model, batches = made()
    qmodel = sparsebit.quantize(model, batches, progress=False)
    with pytest.raises(ExportError, match=r"it starts at \S+ \(QLinearSoftmax\)"):
        qmodel.export_onnx(batches[0], str(tmp_path / "m.onnx"), batches=batches[1:])


@pytest.mark.parametrize(("factor", "ok"), [(1.0, True), (0.95, False)])
def test_wrong_scores_of_a_float_file_are_refused(factor: float, ok: bool, tmp_path: Path) -> None:
    model, batches = made()
    path = tmp_path / "m.onnx"
    assert export_module(model, batches[0], str(path), batches=batches[1:]).ok
    file = onnx.load(path)
    (sigmoid,) = [node for node in file.graph.node if node.op_type == "Sigmoid"]
    made_here, sigmoid.output[0] = sigmoid.output[0], "before"
    file.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(factor), "factor"))
    at = list(file.graph.node).index(sigmoid) + 1
    file.graph.node.insert(at, onnx.helper.make_node("Mul", ["before", "factor"], [made_here]))
    onnx.save(file, path)
    report = sparsebit.verify(path, model, batches)
    assert report.ok is ok
    assert ok or any("[:, :, 4:24]" in line for line in report.certificate.failures())
