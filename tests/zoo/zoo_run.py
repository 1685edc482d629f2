"""One model of the zoo through the whole of Sparsebit: build, float output, calibration, quantized output, MACs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import zoo_shim
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit import QuantConfig
from sparsebit.quantization import QuantModel
from sparsebit.quantization.analysis.costs import measure

# Run by `make test`: small, and of different kinds. The rest needs half an hour and is run by `make zoo`.
SAMPLE = [
    "torchvision-resnet18",
    "torchvision-mobilenet_v3_small",
    "timm-vit_tiny_patch16_224",
    "timm-convnext_atto",
    "transformers-llama-ForCausalLM",
    "transformers-gpt2-ForCausalLM",
    "transformers-bert-ForSequenceClassification",
    "transformers-t5",
]
LEAST_SHARE = 0.95  # of the MACs quantized
CONFIG = QuantConfig.load("w8a8").override("A.RNN_STATE", True)


@dataclass(frozen=True)
class Case:
    """A model nobody edited: how to build it with random weights, and how to make one batch for it."""

    package: str
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]


def params(cases: Iterable[Case]) -> list[Any]:
    """As arguments of a test: those outside of SAMPLE are for `make zoo`."""
    found = {f"{case.package}-{case.name}": case for case in cases}
    return [
        pytest.param(case, id=name, marks=[] if name in SAMPLE else pytest.mark.zoo)
        for name, case in found.items()
    ]


@dataclass(frozen=True)
class Row:
    """What came out."""

    package: str
    family: str
    name: str
    trace: str
    error: float  # largest difference of the float outputs, relative to the largest output
    finite: bool
    db: float | None  # None: the quantized output has other shapes (a detector that found other boxes)
    plain_db: float | None  # of by_hand()
    share: float  # of the MACs: both operands are rounded
    islands: dict[str, str]  # path -> what stopped the trace
    seconds: float


def run(case: Case) -> Row:
    """Through torch.fx; through torch.export where that leaves too much float."""
    row = run_with(case, "fx")
    return row if row.share >= LEAST_SHARE else run_with(case, "export")


def run_with(case: Case, trace: str) -> Row:
    zoo_shim.install()
    torch.manual_seed(0)
    batches = [case.batch(), case.batch()]
    model = waken(case.build(), joined(*batches))
    expected, other = forward(model, batches[0]), forward(model, batches[1])
    start = time.perf_counter()
    qmodel = QuantModel(model, CONFIG, example=batches[0], trace=trace)
    error = difference(expected, forward(qmodel, batches[0]))
    qmodel.calibrate(batches, progress=False)
    qmodel.set_quant(w_quant=True, a_quant=True)
    out = forward(qmodel, batches[0])
    seconds = time.perf_counter() - start
    error = max(error, difference(expected, forward(model, batches[0])))  # the model itself is as it was
    macs = measure(qmodel, batches[0])
    total = sum(macs.macs.values())
    return Row(
        package=case.package,
        family=type(model).__module__.split(".")[2],
        name=case.name,
        trace=trace,
        error=error,
        finite=all(x.isfinite().all().item() for x in floats(out)),
        db=sqnr(floats(expected), floats(out), floats(other)),
        plain_db=sqnr(floats(expected), floats(by_hand(model, batches)), floats(other)),
        share=sum(macs.quantized.values()) / total,
        islands={path: str(found) for path, found in qmodel.islands.items()},
        seconds=seconds,
    )


@torch.no_grad()
def waken(model: nn.Module, batch: Any) -> nn.Module:
    """Give an untrained model values that a mistake would show in.

    Constants (norms, zero biases, zero-initialised branches, layer scales) get random values, faint weights the usual
    size, and batch norms the statistics of `batch`: without that a deep untrained net forgets its input.
    """
    for name, p in model.named_parameters():
        if not p.is_floating_point() or p.numel() < 2:
            continue
        is_token = (
            p.dim() == 3 and p.shape[0] == 1
        )  # class token, position embedding: as large as what it meets
        usual, std, value = 0.5 if is_token else p[0].numel() ** -0.5, float(p.std()), p.max()
        if p.min() == value:
            is_shift = name.endswith("bias") or (p.dim() > 1 and value == 0)
            p.normal_(0, usual if is_token else 0.1) if is_shift else p.uniform_(0.75, 1.25)
        elif p.dim() > 1 and std < usual / 2:
            p.mul_(usual / std)
    norms = [m for m in model.eval().modules() if isinstance(getattr(m, "running_var", None), Tensor)]
    handles = [norm.register_forward_pre_hook(_set_statistics) for norm in norms]
    forward(model, batch)
    for handle in handles:
        handle.remove()
    return model


def _set_statistics(norm: Any, args: tuple[Tensor]) -> None:
    """Unit output power. Taking all of the mean away would make a deep random net chaotic: rounding errors grow."""
    var, mean = torch.var_mean(args[0], [i for i in range(args[0].dim()) if i != 1], correction=0)
    power = var + (0.9 * mean).square()
    norm.running_mean.copy_(0.1 * mean)
    norm.running_var.copy_(power + 0.05 * power.mean() + 1e-8)
    if isinstance(norm.weight, Tensor):
        norm.weight.uniform_(0.75, 1.25)
        norm.bias.normal_(0, 0.5)


def joined(a: Any, b: Any) -> Any:
    """Two batches as one."""
    if isinstance(a, dict):
        return {key: joined(a[key], b[key]) for key in a}
    if isinstance(a, tuple):
        return tuple(map(joined, a, b))
    return a + b if isinstance(a, list) else torch.cat([a, b])


@torch.no_grad()
def by_hand(model: nn.Module, batches: list[Any]) -> Any:
    """The output of plain W8A8, for comparison: min/max grids on weights and inputs of Linear and Conv, by hooks."""
    model = copy.deepcopy(model)
    ranges: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def observe(layer: nn.Module, args: tuple[Tensor]) -> None:
        low, high = ranges.get(layer, (torch.zeros(()), torch.zeros(())))
        ranges[layer] = (torch.minimum(low, args[0].min()), torch.maximum(high, args[0].max()))

    def quantize(layer: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        low, high = ranges[layer]
        scale = ((high - low) / 255).clamp_min(1e-12)
        zero = (-low / scale).round()
        return (((args[0] / scale + zero).round().clamp(0, 255) - zero) * scale,)

    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd))]
    handles = [layer.register_forward_pre_hook(observe) for layer in layers]
    for batch in batches:
        forward(model, batch)
    for handle in handles:
        handle.remove()
    for layer in ranges:
        scale = layer.weight.flatten(1).abs().amax(1).clamp_min(1e-12) / 127
        scale = scale.view(-1, *[1] * (layer.weight.dim() - 1))
        layer.weight.copy_((layer.weight / scale).round() * scale)
        layer.register_forward_pre_hook(quantize)
    return forward(model, batches[0])


@torch.no_grad()
def forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def tensors(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def floats(value: Any) -> list[Tensor]:
    return [x.float() for x in tensors(value) if x.is_floating_point()]


def difference(expected: Any, got: Any) -> float:
    """Largest difference of any tensor, relative to its largest value; inf where the outputs look different."""
    a, b = tensors(expected), tensors(got)
    if type(expected) is not type(got) or [x.shape for x in a] != [x.shape for x in b]:
        return float("inf")
    return max(_relative(x, y) for x, y in zip(a, b) if x.numel())


def _relative(x: Tensor, y: Tensor) -> float:
    if not x.is_floating_point():
        return 0.0 if torch.equal(x, y) else float("inf")
    if not torch.equal(x.isfinite(), y.isfinite()):
        return float("inf")
    x, y = x.double().nan_to_num(0, 0, 0), y.double().nan_to_num(0, 0, 0)
    return float((x - y).abs().max() / x.abs().max().clamp_min(1e-12))


def sqnr(expected: list[Tensor], got: list[Tensor], other: list[Tensor]) -> float | None:
    """Signal to noise in dB, mean over the outputs; the signal is what changes in an output with another input."""
    if not [x.shape for x in expected] == [x.shape for x in got] == [x.shape for x in other]:
        return None
    signals = [(x - z).pow(2).mean() / 2 for x, z in zip(expected, other) if x.numel()]
    noises = [(x - y).pow(2).mean() for x, y in zip(expected, got) if x.numel()]
    ratios = [n / s for s, n in zip(signals, noises) if s > 0]
    return float(-10 * torch.stack(ratios).mean().clamp_min(1e-20).log10()) if ratios else None
