"""Labels are counted over the axis of the classes: a target tells which it is, else the shape of the output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from sparsebit.export.certificate.end_to_end import class_axis
from sparsebit.export.export_module import export_module


@pytest.mark.parametrize(
    "shape, targets, axis",
    [
        ((8, 10), [], 1),
        ((8, 5, 32, 32), [], 1),
        ((8, 20, 30), [], 2),  # tokens
        ((8, 5, 4, 32, 32), [], 1),
        ((8,), [], None),
        ((8, 1), [], None),
        ((8, 10), [()], 1),
        ((8, 20, 30), [(30,)], 1),  # classes first: (N, C, L) with targets (N, L)
        ((8, 20, 30), [(20,)], 2),
        ((8, 20, 20), [(20,)], 2),  # both fit: the usual one
        ((8, 32, 32, 5), [(32, 32)], 3),  # channels last
        ((8, 5, 32, 32), [()], 1),  # a target of another output
    ],
)
def test_axis(shape: tuple[int, ...], targets: list[tuple[int, ...]], axis: int | None) -> None:
    assert class_axis(shape, targets) == axis


class PerFrame(nn.Module):
    """Scores of classes for each frame: (N, C, L), as CTC and taggers by Conv1d give them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("quantized", [True, False])
def test_targets_in_the_batches_name_the_axis(quantized: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    loader = [(torch.randn(2, 4, 12), torch.randint(0, 6, (2, 12))) for _ in range(3)]
    model, path = PerFrame().eval(), tmp_path / "m.onnx"
    if quantized:
        model = sparsebit.quantize(model, loader, progress=False)
        report = model.export_onnx(loader[0], str(path), batches=iter(loader[1:]))
    else:
        report = export_module(model, loader[0], path, batches=iter(loader[1:]))
    for found in (report, sparsebit.verify(path, model, iter(loader))):
        (output,) = found.certificate.runtime.outputs.values()
        assert (output.axis, output.labels) == (1, 3 * 2 * 12)
