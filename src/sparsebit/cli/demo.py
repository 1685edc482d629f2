"""The main job on an embedded default: a small CNN on real handwritten digits, quantized with every observer.

Run it with `make demo`, or `python -m sparsebit.cli.demo` where scikit-learn is installed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import sparsebit
from sparsebit.cli.terminal.output import InputError
from sparsebit.errors import ExportError
from sparsebit.export.onnx.to_onnx import require
from sparsebit.quantization.modules import QuantOpr


class DigitNet(nn.Module):
    """A stem, a residual block and a depthwise-separable block, all with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU())
        self.conv = nn.Sequential(
            nn.Conv2d(24, 24, 3, padding=1, bias=False),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=1, bias=False),
            nn.BatchNorm2d(24),
        )
        self.separable = nn.Sequential(
            nn.Conv2d(24, 24, 3, stride=2, padding=1, groups=24, bias=False),
            nn.BatchNorm2d(24),
            nn.ReLU6(),
            nn.Conv2d(24, 48, 1, bias=False),
            nn.BatchNorm2d(48),
            nn.ReLU6(),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(x + self.conv(x))
        return self.fc(self.pool(self.separable(x)).flatten(1))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,797 scanned digits, 8 x 8 pixels, shipped with scikit-learn; every fourth is kept for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError("the demo needs scikit-learn: pip install 'sparsebit[demo]'") from None
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target)
    held_out = torch.arange(len(x)) % 4 == 0
    return x[~held_out], y[~held_out], x[held_out], y[held_out]


def train(net: nn.Module, x: Tensor, y: Tensor, epochs: int = 30) -> None:
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-2, total_steps=epochs * (len(x) // 64 + 1))
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(64):
            loss = F.cross_entropy(net(x[index]), y[index])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    net.eval()


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    return (net(x).argmax(1) == y).float().mean().item() * 100


def pruned(net: nn.Module, x: Tensor, y: Tensor, batches: list[Tensor]) -> nn.Module:
    """Half of the multiplications go; the rest is trained for a few epochs."""
    small = sparsebit.prune(net, x[:8], macs=0.5, batches=batches)
    train(small.train(), x, y, epochs=5)
    return small


def seconds(work: Any, repeats: int = 5) -> float:
    """The best of a few runs: machines are noisy."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def weight_bytes(qmodel: sparsebit.QuantModel) -> float:
    """Bytes of the weights at their quantized width, biases in float32."""
    bits = 8 * 4 * sum(p.numel() for n, p in qmodel.named_parameters() if n.endswith("bias"))
    for module in qmodel.model.modules():
        if isinstance(module, QuantOpr) and module.weight_quantizer is not None:
            bits += module.weight.numel() * module.weight_quantizer.bit
    return bits / 8


def certificates(console: Console, net: nn.Module, batches: list[Tensor], x_test: Tensor) -> dict[str, Any]:
    """Export both models and say how their files were checked; without the packages, which extra brings them."""
    try:
        require("onnx", "onnxscript", "onnxruntime")
    except ExportError as error:
        console.print(f"no ONNX files: {error}", markup=False)
        return {}
    reports = {}
    for preset in ("w8a8", "w4a4"):
        qmodel = sparsebit.quantize(net, batches, preset, progress=False)
        axes = {"x": {0: "batch"}}
        with tempfile.TemporaryDirectory() as folder, console.status(f"exporting {preset} ..."):
            file = str(Path(folder) / "digits.onnx")
            report = qmodel.export_onnx(x_test[:8], file, ["x"], dynamic_axes=axes, batches=[x_test[8:]])
        shown = ("certificate", "each quantizer", "as users run it", "noise floor", "integer kernels")
        lines = [line for line in str(report).splitlines() if line.startswith(shown)]
        console.print(
            f"\n{preset.upper()} as ONNX, {report.bytes / 1000:.0f} kB", *lines, sep="\n", markup=False
        )
        reports[preset] = {"ok": report.ok, "bytes": report.bytes}
    return reports


@dataclass
class Line:
    """One row of the table."""

    bits: str
    observer: str
    accuracy: float  # per cent of the test images
    bytes: float  # of the weights
    calibration: float | None = None  # its time, as a multiple of a float forward over the same images

    def cells(self) -> list[str]:
        if self.calibration is None:
            took = ""
        else:
            took = f"{self.calibration:.2f} x"
        return [self.bits, self.observer, f"{self.accuracy:.2f}", f"{self.bytes / 1000:.1f}", took]


def float_bytes(net: nn.Module) -> float:
    return sum(p.numel() * 4 for p in net.parameters())


def quantized_lines(net: nn.Module, batches: list[Tensor], test: tuple[Tensor, Tensor]) -> Iterator[Line]:
    """Both presets with every observer."""
    from sparsebit.quantization.observers import OBSERVERS_MAP

    with torch.no_grad():
        forward = seconds(lambda: [net(b) for b in batches])
    for preset in ("w8a8", "w4a4"):
        for observer in sorted(OBSERVERS_MAP):
            config = sparsebit.QuantConfig.load(preset).override("A.OBSERVER.TYPE", observer)
            qmodel = sparsebit.QuantModel(net, config)
            took = seconds(lambda q=qmodel: q.calibrate(batches, progress=False))
            qmodel.set_quant(w_quant=True, a_quant=True)
            share = accuracy(qmodel, *test)
            yield Line(preset.upper(), observer, share, weight_bytes(qmodel), took / forward)


NEXT = """
next: your own model. net.py holds a function build() that returns it, images is a folder of a few dozen pictures:
  sparsebit check net.py:build --input-shape 1,3,224,224
  sparsebit quantize net.py:build --data images --input-shape 1,3,224,224 -o runs/w8a8
"""


def run(quiet: bool = False) -> dict[str, Any]:
    """Run the demo; returns its text."""
    console = Console(quiet=quiet)
    torch.manual_seed(0)
    x, y, x_test, y_test = digits()
    net = DigitNet()
    with console.status("training a small CNN on handwritten digits ..."):
        train(net, x, y)
    batches = list(x[:512].split(64))
    lines = [Line("float32", "", accuracy(net, x_test, y_test), float_bytes(net))]
    with console.status("quantizing it with every observer ..."):
        lines += quantized_lines(net, batches, (x_test, y_test))
    with console.status("pruning to half the multiplications, and training on for 5 epochs ..."):
        small = pruned(net, x, y, batches)
    qmodel = sparsebit.quantize(small, batches, progress=False)
    lines.append(Line("pruned", "", accuracy(small, x_test, y_test), float_bytes(small)))
    lines.append(Line("pruned W8A8", "", accuracy(qmodel, x_test, y_test), weight_bytes(qmodel)))
    console.print(table_of(lines, f"handwritten digits: {len(x)} to train, {len(x_test)} to test"))
    console.print("calibrated on 512 training images; every row: sparsebit.quantize(net, batches, config)")
    console.print("8x8 images show the fixed cost of calibration; at 224x224 it is 1.0-1.3 x (make bench)")
    files = certificates(console, net, batches, x_test)
    console.print(NEXT, markup=False, highlight=False, soft_wrap=True)  # a command must stay one line
    return {"rows": [asdict(line) for line in lines], "onnx": files}


def table_of(lines: list[Line], title: str) -> Table:
    table = Table(title=title)
    for name in ("bits", "observer", "accuracy %", "weights kB", "calibration / float forward"):
        table.add_column(name, justify="left" if name in ("bits", "observer") else "right")
    for before, line in zip([lines[0], *lines], lines):
        if line.bits.partition(" ")[0] != before.bits.partition(" ")[0]:
            table.add_section()
        table.add_row(*line.cells())
    return table


def main() -> None:
    try:
        run()
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
