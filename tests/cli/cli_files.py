"""The files that the tests of the command work on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sparsebit.cli.inputs.models import load_model
from sparsebit.export.certificate import runtime

NET = """
import torch
from torch import nn


def build():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5),
    )


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, left, right):
        return self.fc(left + right)


def batches():
    torch.manual_seed(2)
    for _ in range(3):
        yield torch.randn(4, 3, 8, 8)


def nothing():
    return []


def fails():
    raise ValueError("no such checkpoint")


def a_dict():
    return {}


THREE = 3
"""


def fill(folder: Path) -> Path:
    (folder / "net.py").write_text(NET)
    torch.manual_seed(0)
    x = torch.randn(12, 3, 8, 8)
    np.save(folder / "x.npy", x.numpy())
    np.savez(folder / "xy.npz", images=x.numpy(), labels=np.arange(12) % 5)
    return folder


def state(folder: Path, name: str = "net.safetensors", **changes: torch.Tensor) -> Path:
    """Weights that fit `net.py:build`, with changes."""
    model = load_model(f"{folder / 'net.py'}:build")
    save_file({k: v.contiguous() for k, v in (model.state_dict() | changes).items()}, folder / name)
    return folder / name


def net(folder: Path) -> torch.nn.Module:
    return load_model(f"{folder / 'net.py'}:build")


def batches(folder: Path, size: int = 4) -> list[torch.Tensor]:
    return list(torch.from_numpy(np.load(folder / "x.npy")).split(size))


def run_onnx(path: Path, x: torch.Tensor) -> np.ndarray:
    pytest.importorskip("onnxruntime")
    session = runtime.session(path)
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
