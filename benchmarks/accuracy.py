"""Accuracy of W8A8 on real weights, every observer, as tables (needs SPARSEBIT_ASSETS).

    python benchmarks/accuracy.py cifar        ResNet-20/32/44 on all of CIFAR-10 test, 256 training images
    python benchmarks/accuracy.py mobilenet    MobileNetV2 on 750 ImageNet images, calibrated on 250 others
    python benchmarks/accuracy.py presets      ResNet-20 as in cifar, with every preset that needs no training

Top-1 of 750 images is noisy (half a point means nothing); the SQNR of the logits against float is the sharp figure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import assets
import figures
import sparsebit
from sparsebit.quantization.observers import OBSERVERS_MAP
from sparsebit.quantization.presets import presets

CLASSIC = {  # what the original's YAML files say: no bias correction, weights by min/max
    "SCHEDULE": {"FUSE_BN": True},
    "W": {"QSCHEME": "per-channel-symmetric"},
    "A": {"QSCHEME": "per-tensor-affine"},
}


NO_QADD = ("W.OBSERVER.TYPE", "mse", "SCHEDULE.EQUALIZE", False, "A.QADD.ENABLE_QUANT", False)
BEST_TOP1 = "w8a8, W mse, no EQUALIZE, no QADD, virtual"


def with_observer(name: str, *overrides: object) -> sparsebit.QuantConfig:
    return sparsebit.QuantConfig.load(CLASSIC).override("A.OBSERVER.TYPE", name, *overrides)


def measure(
    net: nn.Module, config: object, calibration: list[Tensor], x: Tensor, y: Tensor, reference: Tensor
):
    """(top-1, SQNR of the logits in dB) of the quantized network."""
    out = assets.logits(sparsebit.quantize(net, calibration, config, progress=False), x)
    return assets.top1(out, y), assets.sqnr(reference, out)


def cifar(depth: int, configs: dict[str, object]) -> Iterator[tuple[str, float, float]]:
    """Rows (name of the config, top-1, dB); the first row is float."""
    net = assets.cifar_resnet(depth)
    x, y = assets.cifar10("test")
    calibration = list(assets.cifar10("train20k", 256)[0].split(32))
    reference = assets.logits(net, x)
    yield "float", assets.top1(reference, y), float("inf")
    for name, config in configs.items():
        yield name, *measure(net, config, calibration, x, y, reference)


def mobilenet(configs: dict[str, object]) -> Iterator[tuple[str, float, float]]:
    net = assets.mobilenet_v2()
    images, x, y = assets.split_imagenet()
    calibration = list(images.split(25))
    reference = assets.logits(net, x, 25)
    yield "float", assets.top1(reference, y), float("inf")
    for name, config in configs.items():
        yield name, *measure(net, config, calibration, x, y, reference)


def mobilenet_configs() -> dict[str, object]:
    """The default, then every observer with affine and with symmetric activations."""
    configs: dict[str, object] = {
        "w8a8 (no config)": None,
        "w8a8, MIN_VALUES 1": sparsebit.QuantConfig.load("w8a8").override(
            "A.OBSERVER.MEAN_MINMAX.MIN_VALUES", 1
        ),
        "w8a8, W mse, MIN_VALUES 1": sparsebit.QuantConfig.load("w8a8").override(
            "A.OBSERVER.MEAN_MINMAX.MIN_VALUES", 1, "W.OBSERVER.TYPE", "mse"
        ),
        BEST_TOP1: sparsebit.QuantConfig.load("w8a8").override(*NO_QADD, "BACKEND", "virtual"),
        "w8a8, W mse, no EQUALIZE, no QADD": sparsebit.QuantConfig.load("w8a8").override(*NO_QADD),
        "w8a8-tensorrt": "w8a8-tensorrt",
    }
    for scheme in ("affine", "symmetric"):
        for observer in sorted(OBSERVERS_MAP):
            configs[f"{observer}, {scheme}"] = with_observer(observer, "A.QSCHEME", f"per-tensor-{scheme}")
    return configs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["cifar", "mobilenet", "presets"])
    parser.add_argument("--depths", type=int, nargs="+", default=[20, 32, 44])
    parser.add_argument("--rows", nargs="+", help="only these; all, if left out")
    parser.add_argument(
        "--save", action="store_true", help="keep the figures in docs/figures/accuracy_WHAT.json"
    )
    args = parser.parse_args()
    start, rows = figures.started(), []
    if assets.MISSING:
        sys.exit(assets.MISSING)
    print(f"torch {torch.__version__}; top-1 %, SQNR of the logits in dB")
    configs: dict[str, object] = {
        "mobilenet": mobilenet_configs,
        "presets": lambda: {name: name for name in presets() if not name.endswith("-qat")},
        "cifar": lambda: {name: with_observer(name) for name in sorted(OBSERVERS_MAP)},
    }[args.what]()
    configs = {name: configs[name] for name in args.rows or configs}
    if args.what == "mobilenet":
        found = {"MobileNetV2": mobilenet(configs)}
    else:
        depths = args.depths if args.what == "cifar" else [20]
        found = {f"ResNet-{depth}": cifar(depth, configs) for depth in depths}
    for model, measured in found.items():
        for name, top1, db in measured:
            print(f"{model}  {name:28s} {top1:6.2f} {db:6.2f}", flush=True)
            row = {"model": model, "setting": name, "top1": round(top1, 2)}
            rows.append(row if name == "float" else {**row, "sqnr": round(db, 2)})
    if args.save:
        figures.save(f"accuracy_{args.what}", rows, start)


if __name__ == "__main__":
    main()
