"""A training step with W4A4 LSQ against the float step, in one run: ours, torch's learnable fake-quant, Brevitas.

    python benchmarks/qat_speed.py [--compile] [--models resnet20 mobilenet_v2] [--rounds 8]

Batch norms stay in the network on both sides. Rounds are interleaved and the best of each counts: machines are noisy,
ratios in one run are not. Brevitas is measured where it is installed. `plain` is ours without a C compiler.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import assets
import figures
import sparsebit
from sparsebit.numeric import kernels

CONFIG = {
    "W": {"QSCHEME": "per-channel-symmetric", "QUANTIZER": {"TYPE": "lsq", "BIT": 4}},
    "A": {"QSCHEME": "per-tensor-affine", "QUANTIZER": {"TYPE": "lsq", "BIT": 4}},
}
BATCH = {"resnet20": (128, 32), "mobilenet_v2": (16, 224)}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return assets.CifarResNet(20) if name == "resnet20" else assets.mobilenet_v2(pretrained=False)


def ours(net: nn.Module, x: Tensor) -> nn.Module:
    qmodel = sparsebit.QuantModel(net.eval(), CONFIG)
    qmodel.prepare_calibration(asym=False)
    with torch.no_grad():
        qmodel(x)
    qmodel.init_QAT()
    return qmodel.train()


class TorchLearnable(nn.Module):
    """torch's own kernel for a learned scale and zero point."""

    def __init__(self, channels: int, signed: bool):
        super().__init__()
        self.scale, self.zero = (
            nn.Parameter(torch.full((channels,), 0.1)),
            nn.Parameter(torch.zeros(channels)),
        )
        self.range = (-8, 7) if signed else (0, 15)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.scale) == 1:
            return torch._fake_quantize_learnable_per_tensor_affine(
                x, self.scale, self.zero, *self.range, 0.01
            )
        return torch._fake_quantize_learnable_per_channel_affine(
            x, self.scale, self.zero, 0, *self.range, 0.01
        )


class TorchLayer(nn.Module):
    """A convolution or linear layer whose input and weight pass `TorchLearnable`."""

    def __init__(self, layer: nn.Module, signed: bool):
        super().__init__()
        self.layer, self.a, self.w = layer, TorchLearnable(1, signed), TorchLearnable(len(layer.weight), True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.layer, {"weight": self.w(self.layer.weight)}, (self.a(x),))


def replaced(net: nn.Module, make: Callable[[nn.Module, bool], nn.Module]) -> nn.Module:
    """`net` with every convolution and linear layer made anew; only the first input has negative values."""
    first = True
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (nn.Conv2d, nn.Linear)):
                setattr(parent, name, make(child, first))
                first = False
    return net.train()


def torch_learnable(net: nn.Module, x: Tensor) -> nn.Module:
    return replaced(net, TorchLayer)


def brevitas(net: nn.Module, x: Tensor) -> nn.Module:
    import brevitas.nn as qnn
    from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Uint8ActPerTensorFloat

    def make(layer: Any, signed: bool) -> nn.Module:
        options = {
            "weight_quant": Int8WeightPerChannelFloat,
            "weight_bit_width": 4,
            "input_quant": Int8ActPerTensorFloat if signed else Uint8ActPerTensorFloat,
            "input_bit_width": 4,
            "bias": layer.bias is not None,
        }
        if isinstance(layer, nn.Linear):
            return qnn.QuantLinear(layer.in_features, layer.out_features, **options)
        sizes = (layer.in_channels, layer.out_channels, layer.kernel_size)
        more = {"stride": layer.stride, "padding": layer.padding, "groups": layer.groups}
        return qnn.QuantConv2d(*sizes, **more, **options)

    made = replaced(net, make)
    for _ in range(3):
        made(x)
    return made


def stepper(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def plainly(step: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        kernels.use_native(False)
        try:
            step()
        finally:
            kernels.use_native(True)

    return run


def measure(name: str, compiled: bool, rounds: int, peers: bool) -> dict[str, float]:
    """Seconds of CPU time per step, the best of all rounds."""
    batch, size = BATCH[name]
    x, y = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    models = {"float": network(name).train(), "sparsebit": ours(network(name), x)}
    if peers:
        models["torch's learnable"] = torch_learnable(network(name), x)
        if find_spec("brevitas"):
            models["brevitas"] = brevitas(network(name), x)
    if not compiled:
        models["sparsebit, plain"] = copy.deepcopy(models["sparsebit"])
    else:
        models = {name: torch.compile(model) for name, model in models.items()}
    steps = {label: stepper(model, x, y) for label, model in models.items()}
    if "sparsebit, plain" in steps:
        steps["sparsebit, plain"] = plainly(steps["sparsebit, plain"])
    best = dict.fromkeys(steps, float("inf"))
    for i in range(rounds + 2):
        for label, step in steps.items():
            start = time.process_time()
            step()
            if i >= 2:
                best[label] = min(best[label], time.process_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(BATCH), choices=list(BATCH))
    parser.add_argument("--compile", action="store_true", help="torch.compile every model first")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--save", action="store_true", help="keep the figures in docs/figures/qat_speed.json")
    options = parser.parse_args()
    start, rows = figures.started(), []
    how = "compiled" if options.compile else "eager"
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads of {os.cpu_count()}, {how}; CPU time per step"
    )
    for name in options.models:
        best = measure(name, options.compile, options.rounds, not options.no_peers)
        times = {label: round(t / best["float"], 2) for label, t in best.items() if label != "float"}
        shown = ", ".join(f"{label} {value:.2f} x" for label, value in times.items())
        print(f"{name:13s} float {best['float'] * 1000:.0f} ms; {shown}", flush=True)
        rows.append({"model": name, "times_float": times})
    if options.save:
        figures.save("qat_speed", rows, start, versions=figures.versions(("brevitas",)))


if __name__ == "__main__":
    main()
