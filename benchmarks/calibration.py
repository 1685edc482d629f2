"""Calibration and simulated forward as multiples of the float forward of the same batches, in the same run.

    python benchmarks/calibration.py [--batches 16] [--observers minmax mse] [--models mobilenet_v2]

Bars: calibration 1.25 x for minmax and moving_average, 1.6 x for the others; memory at 64 batches 1.05 x of that
at 8; W8A8 forward 1.35 x. Float and quantized runs alternate, and each figure is the median of the ratios.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import sparsebit
from assets import mobilenet_v2

LIMITS = {"minmax": 1.25, "moving_average": 1.25}
OBSERVERS = ["minmax", "moving_average", "mean_minmax", "percentile", "mse", "kl_histogram", "aciq"]


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


def resnet18() -> nn.Module:
    """The shape of ResNet-18, random weights."""
    torch.manual_seed(0)
    rows = [
        (64, 64, 1),
        (64, 64, 1),
        (64, 128, 2),
        (128, 128, 1),
        (128, 256, 2),
        (256, 256, 1),
        (256, 512, 2),
    ]
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        *[BasicBlock(*row) for row in [*rows, (512, 512, 1)]],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 1000),
    ).eval()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": resnet18,
    "mobilenet_v2": lambda: mobilenet_v2(pretrained=False),
}


def batches(n: int) -> Iterator[Tensor]:
    g = torch.Generator().manual_seed(0)
    for _ in range(n):
        yield torch.randn(8, 3, 224, 224, generator=g)


def clock(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def config(observer: str) -> sparsebit.QuantConfig:
    return sparsebit.QuantConfig.load("w8a8").override(
        "A.OBSERVER.TYPE", observer, "W.OBSERVER.TYPE", "minmax"
    )


@torch.no_grad()
def ratios(model: nn.Module, observer: str, data: list[Tensor], repeats: int) -> tuple[float, float]:
    """(calibration / float forward, quantized forward / float forward): medians over alternating runs."""
    calibration, forward = [], []
    for _ in range(repeats):
        plain = clock(lambda: [model(x) for x in data])
        qmodel = sparsebit.QuantModel(model, config(observer))
        calibration.append(clock(lambda q=qmodel: q.calibrate(data, progress=False)) / plain)
        qmodel.set_quant(True, True)
        quantized = clock(lambda q=qmodel: [q(x) for x in data])
        forward.append(quantized / clock(lambda: [model(x) for x in data]))
    return statistics.median(calibration), statistics.median(forward)


def peak(name: str, observer: str, n: int) -> float:
    """Peak memory in MB of a process that calibrates on `n` batches."""
    command = [sys.executable, __file__, "--peak", str(n), "--models", name, "--observers", observer]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--observers", nargs="+", default=OBSERVERS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        qmodel = sparsebit.QuantModel(MODELS[args.models[0]](), config(args.observers[0]))
        qmodel.calibrate(batches(args.peak), progress=False)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    data = list(batches(args.batches))
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.batches} batches of 8x3x224x224"
    )
    for name in args.models:
        model = MODELS[name]()
        with torch.no_grad():
            model(data[0])
        for observer in args.observers:
            calibration, forward = ratios(model, observer, data, args.repeats)
            limit = LIMITS.get(observer, 1.6)
            line = f"{name:13s} {observer:15s} calibration {calibration:.2f} x (bar {limit})  forward {forward:.2f} x"
            if not args.no_memory and observer in ("minmax", "percentile"):
                low, high = peak(name, observer, 8), peak(name, observer, 64)
                line += (
                    f"  peak memory 8 / 64 batches: {low:.0f} / {high:.0f} MB, {high / low:.2f} x (bar 1.05)"
                )
            print(line, flush=True)


if __name__ == "__main__":
    main()
