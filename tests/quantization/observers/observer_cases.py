"""Observers from short config texts, data of all shapes, and brute-force references on whole data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsebit.numeric import QuantSpec, as_channels, fake_quantize, qparams_from_minmax
from sparsebit.quantization.observers import Observer, build_observer
from sparsebit.quantization.quant_config import QuantConfig
from sparsebit.quantization.quantizers.quant_descriptor import QuantDescriptor

ALL = ["minmax", "mean_minmax", "moving_average", "percentile", "mse", "kl_histogram", "aciq"]
HISTOGRAM = ["percentile", "mse", "kl_histogram", "aciq"]
SCHEMES = ["per-tensor-symmetric", "per-tensor-affine", "per-channel-symmetric", "per-channel-affine"]


def tensor_config(
    kind: str, letter: str = "a", scheme: str = "per-tensor-affine", bit: int = 8, **options: Any
) -> Any:
    layout = {"layout": options.pop("layout")} if "layout" in options else {}
    observer = {"type": kind, **layout, **({kind: options} if options else {})}
    section = {"qscheme": scheme, "quantizer": {"bit": bit}, "observer": observer}
    cfg = QuantConfig.load({"backend": "virtual", letter: section})
    return getattr(cfg, letter)


def make(
    kind: str, letter: str = "a", scheme: str = "per-tensor-affine", bit: int = 8, **options: Any
) -> Observer:
    cfg = tensor_config(kind, letter, scheme, bit, **options)
    return build_observer(cfg, QuantDescriptor(cfg))


def laplace(*shape: int) -> Tensor:
    return -torch.rand(*shape).clamp(min=1e-30).log() * torch.randn(*shape).sign()


DATA: dict[str, Callable[..., Tensor]] = {
    "normal": lambda *s: torch.randn(*s),
    "laplace": laplace,
    "uniform": lambda *s: torch.rand(*s) * 2 - 1,
    "one_sided": lambda *s: torch.randn(*s).relu(),
    "shifted": lambda *s: torch.randn(*s) + 5,
    "lopsided": lambda *s: torch.nn.functional.silu(torch.randn(*s) * 3),
    "outliers": lambda *s: torch.where(torch.rand(*s) < 1e-3, torch.randn(*s) * 30, torch.randn(*s)),
}


def batches(name: str, channels: int = 4) -> list[Tensor]:
    """NCHW batches of different height and width; every channel has a scale of its own."""
    scale = 2.0 ** torch.arange(channels).view(-1, 1, 1)
    return [DATA[name](2, channels, h, w) * scale for h, w in ((40, 40), (24, 56), (64, 32))]


def rows_of(data: list[Tensor], axis: int | None) -> Tensor:
    """Everything, as (channels, values)."""
    return torch.cat([as_channels(x.float(), axis) for x in data], 1)


def feed(observer: Observer, data: list[Tensor]) -> Observer:
    for x in data:
        observer.update(x)
    return observer


def range_of(observer: Observer) -> tuple[Tensor, Tensor]:
    observer.calc_qparams()
    return observer.min_val, observer.max_val


def squared_error(rows: Tensor, lo: Tensor, hi: Tensor, spec: QuantSpec) -> Tensor:
    """True error of fake quantization per row."""
    spec = QuantSpec(spec.bits, spec.symmetric, axis=0)
    return (fake_quantize(rows, qparams_from_minmax(lo, hi, spec), spec) - rows).double().square().mean(1)


def least_error(rows: Tensor, spec: QuantSpec) -> Tensor:
    """The least error of a fine grid of ranges: both ends together, and each end on its own if that helps."""
    low, high = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
    shares = torch.cat([torch.arange(1, 8) / 400, torch.arange(1, 51) / 50])
    best = torch.full_like(low, torch.inf, dtype=torch.float64)
    at = torch.ones(2, len(rows))
    two_sided = not spec.symmetric and bool((low < 0).any() and (high > 0).any())
    coarse = [(f, g) for f in shares[::3] for g in shares[::3]] if two_sided else []
    for f, g in [(f, f) for f in shares] + coarse:
        error = squared_error(rows, low * f, high * g, spec)
        at = torch.where(error < best, torch.stack([f, g])[:, None], at)
        best = best.minimum(error)
    for f in torch.linspace(0.95, 1.0 / 0.95, 11):
        for g in torch.linspace(0.95, 1.0 / 0.95, 11) if two_sided else [f]:
            best = best.minimum(
                squared_error(rows, low * (at[0] * f).clamp(max=1), high * (at[1] * g).clamp(max=1), spec)
            )
    return best
