"""Reconstruction (AdaRound) on real weights, as a table; the images and splits of accuracy.py (needs SPARSEBIT_ASSETS).

    python benchmarks/adaround.py cifar        ResNet-20 on all of CIFAR-10 test, 256 training images
    python benchmarks/adaround.py mobilenet    MobileNetV2 on 750 ImageNet images, calibrated on 250 others

Seconds are CPU time of one reconstruction, calibration included. Bars: ResNet-20 (91.73) W4A8 within 0.2, W3A8 within
1.0, W4A4 with 8-bit first and last layer at least 89.0; MobileNetV2 (84.13) W4A8 within 3 in at most 10 minutes on two
cores; blocks ahead of layers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import assets
import sparsebit

BARS = {"W4A8": 91.53, "W3A8": 90.73, "W4A4, ends 8": 89.0, "MobileNetV2 W4A8": 81.13}
LONGER = ("W.QUANTIZER.ADAROUND.STEPS", 600)
Row = tuple[str, float, float, float]  # name, top-1, dB, CPU seconds


def config(weights: int = 4, activations: int = 8, unit: str = "block", *more: Any) -> sparsebit.QuantConfig:
    bits = ("W.QUANTIZER.BIT", weights, "A.QUANTIZER.BIT", activations)
    return sparsebit.QuantConfig.load("w4a8-adaround").override(
        *bits, "W.QUANTIZER.ADAROUND.UNIT", unit, *more
    )


def ends_at_8(*layers: str) -> tuple[Any, ...]:
    """First and last layer at 8 bits; activations by mse, as the w4a4 preset has them."""
    specific = [{layer: ["QUANTIZER.BIT", 8]} for layer in layers]
    return ("W.SPECIFIC", specific, "A.SPECIFIC", specific, "A.OBSERVER.TYPE", "mse")


def cifar_configs() -> dict[str, Any]:
    return {
        "W4A8": config(4, 8),
        "W4A8 by layer": config(4, 8, "layer"),
        "W3A8": config(3, 8),
        "W3A8 by layer": config(3, 8, "layer"),
        "W4A4, ends 8": config(4, 4, "block", *ends_at_8("conv1", "linear")),
    }


def mobilenet_configs() -> dict[str, Any]:
    return {
        "MobileNetV2 W4A8": config(4, 8, "block", *LONGER),
        "MobileNetV2 W4A8 by layer": config(4, 8, "layer", *LONGER),
    }


def measure(
    net: nn.Module, cfg: Any, calibration: list[Tensor], x: Tensor, y: Tensor, reference: Tensor, export: bool
):
    """(top-1, dB, CPU seconds) of the reconstructed network; with `export`, its file must pass the certificate."""
    start = time.process_time()
    qmodel = sparsebit.quantize(net, calibration, cfg, progress=None)
    seconds = time.process_time() - start
    out = assets.logits(qmodel, x, len(calibration[0]))
    if export:
        with tempfile.TemporaryDirectory() as folder:
            assert qmodel.export_onnx(x[:2], str(Path(folder) / "net.onnx")).ok
    return assets.top1(out, y), assets.sqnr(reference, out), seconds


def cifar(configs: dict[str, Any], export: bool = False) -> Iterator[Row]:
    """Rows; the first is float."""
    net = assets.cifar_resnet(20)
    x, y = assets.cifar10("test")
    calibration = list(assets.cifar10("train20k", 256)[0].split(32))
    yield from _rows(net, configs, calibration, x, y, export)


def mobilenet(configs: dict[str, Any], export: bool = False) -> Iterator[Row]:
    """250 images are few for 3.5 million weights: each is also given mirrored, and both enlarged at random."""
    images, x, y = assets.split_imagenet()
    generator = torch.Generator().manual_seed(0)
    views = [images, images.flip(-1)]
    views += [enlarged(view, generator) for view in views]
    yield from _rows(assets.mobilenet_v2(), configs, [b for v in views for b in v.split(25)], x, y, export)


def enlarged(images: Tensor, generator: torch.Generator, least: float = 0.75) -> Tensor:
    """A random square of each image, at least 0.75 of its side, in its full size."""
    full, found = images.shape[-1], []
    for image in images:
        side = int(full * (least + (1 - least) * float(torch.rand(1, generator=generator))))
        top, left = (int(torch.randint(0, full + 1 - side, (1,), generator=generator)) for _ in range(2))
        part = image[None, :, top : top + side, left : left + side]
        found.append(nn.functional.interpolate(part, (full, full), mode="bilinear", antialias=True))
    return torch.cat(found)


def _rows(
    net: nn.Module, configs: dict[str, Any], calibration: list[Tensor], x: Tensor, y: Tensor, export: bool
) -> Iterator[Row]:
    reference = assets.logits(net, x, len(calibration[0]))
    yield "float", assets.top1(reference, y), float("inf"), 0.0
    for name, cfg in configs.items():
        yield name, *measure(net, cfg, calibration, x, y, reference, export)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["cifar", "mobilenet"])
    parser.add_argument("--only", nargs="+", help="names of the rows")
    parser.add_argument("--export", action="store_true", help="also export each model with its certificate")
    args = parser.parse_args()
    if assets.MISSING:
        sys.exit(assets.MISSING)
    configs = cifar_configs() if args.what == "cifar" else mobilenet_configs()
    chosen = {name: cfg for name, cfg in configs.items() if not args.only or name in args.only}
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; top-1 %, SQNR of the logits in dB, CPU s"
    )
    for name, top1, db, seconds in (cifar if args.what == "cifar" else mobilenet)(chosen, args.export):
        bar = BARS.get(name)
        verdict = "" if bar is None else f"  bar {bar}: {'met' if top1 >= bar else 'MISSED'}"
        print(f"{name:28s} {top1:6.2f} {db:6.2f} {seconds:6.0f}{verdict}", flush=True)


if __name__ == "__main__":
    main()
