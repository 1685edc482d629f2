"""Shuffles and strided slices of channels are one Gather in files for onnxruntime, and stay exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import sparsebit


def shuffled(x: Tensor, groups: int) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)


def turned_around(x: Tensor) -> Tensor:
    """Not a shuffle: height and width change places."""
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(3, 4).reshape(n, c, w, h)


def halves_of_sums(x: Tensor) -> Tensor:
    """Every second channel, and the others, as FastestDet takes them."""
    b, c, h, w = x.shape
    x = x.reshape(b * c // 2, 2, h * w).permute(1, 0, 2).reshape(2, -1, c // 2, h, w)
    return torch.cat([x[1], x[0]], 1)


MOVES = {
    "two groups": (lambda x: shuffled(x, 2), 1),
    "four groups": (lambda x: shuffled(x, 4), 1),
    "as a module": (nn.ChannelShuffle(2), 1),
    "every second": (lambda x: torch.cat([x[:, 1::2], x[:, ::2]], 1), 2),
    "every third from a place": (lambda x: x[:, 1:11:3], 1),
    "FastestDet": (halves_of_sums, 2),
    "another shuffle": (turned_around, 0),
    "a slice without steps": (lambda x: x[:, 2:7], 0),
    "steps over the height": (lambda x: x[:, :, ::2], 0),
}


class Net(nn.Module):
    def __init__(self, move) -> None:
        super().__init__()
        self.a, self.move = nn.Conv2d(4, 12, 3), move
        channels = move(torch.zeros(1, 12, 8, 8)).shape[1]
        self.b = nn.Conv2d(channels, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.move(self.a(x).relu()))


@pytest.mark.parametrize(
    ("name", "free"), [(name, True) for name in MOVES] + [("two groups", False), ("FastestDet", False)]
)
def test_moves_of_channels(name: str, free: bool, tmp_path: Path) -> None:
    move, gathers = MOVES[name]
    torch.manual_seed(0)
    model, batches = Net(move).eval(), [torch.randn(2, 4, 10, 10) for _ in range(4)]
    qmodel = sparsebit.quantize(model, batches, progress=False)
    axes = {"x": {0: "batch"}} if free else None
    file = tmp_path / "m.onnx"
    report = qmodel.export_onnx(batches[0], str(file), ["x"], dynamic_axes=axes, batches=batches[1:])
    assert report.ok
    ops = [node.op_type for node in onnx.load(file).graph.node]
    assert ops.count("Gather") == gathers
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = qmodel(batches[3]).numpy()
    found = session.run(None, {"x": batches[3].numpy()})[0]
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
