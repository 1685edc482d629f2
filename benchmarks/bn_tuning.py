"""What batch-norm tuning gives ResNet-20 at W4A4 (first and last layer 8 bits), on real weights (SPARSEBIT_ASSETS).

    python benchmarks/bn_tuning.py [--seeds 3] [--images 10000]

256 training images calibrate and tune; top-1 and the SQNR of the logits on the CIFAR-10 test images, per seed.
"classic" is what the original's YAML files say: ranges by min/max, no bias correction; "w4a4" is the preset.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn

import assets
import sparsebit
from sparsebit.quantization import QuantModel
from sparsebit.quantization.calibration.batchnorm_tuning import batchnorm_tuning

EIGHT = [{name: ["QUANTIZER.BIT", 8] for name in ("conv1", "linear")}]
CLASSIC = {"W": {"QUANTIZER": {"BIT": 4}}, "A": {"QUANTIZER": {"BIT": 4}}}
CONFIGS = {"classic": CLASSIC, "w4a4": "w4a4"}


def config(name: str) -> sparsebit.QuantConfig:
    base = sparsebit.QuantConfig.load(CONFIGS[name])
    return base.override("SCHEDULE.BN_TUNING", True, "W.SPECIFIC", EIGHT, "A.SPECIFIC", EIGHT)


def tuned_and_not(net: nn.Module, name: str, batches: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the quantized network before and after tuning."""
    qmodel = QuantModel(net, config(name)).calibrate(batches, progress=False)
    qmodel.set_quant(w_quant=True, a_quant=True)
    before = assets.logits(qmodel, x, 250)
    with torch.no_grad(), batchnorm_tuning(qmodel):
        for batch in batches:
            qmodel(batch)
    return before, assets.logits(qmodel, x, 250)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=10000)
    args = parser.parse_args()
    if assets.MISSING:
        sys.exit(assets.MISSING)
    net, (x, y), train = (
        assets.cifar_resnet(20),
        assets.cifar10("test", args.images),
        assets.cifar10("train20k")[0],
    )
    real = assets.logits(net, x, 250)
    print(f"torch {torch.__version__}, {len(x)} test images; float {assets.top1(real, y):.2f} %", flush=True)
    for name in CONFIGS:
        for seed in range(args.seeds):
            chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:256]
            outs = tuned_and_not(net, name, list(train[chosen].split(32)), x)
            before, after = (f"{assets.top1(o, y):.2f} % {assets.sqnr(real, o):5.2f} dB" for o in outs)
            print(f"{name:8s} seed {seed}   W4A4 {before}   tuned {after}", flush=True)


if __name__ == "__main__":
    main()
