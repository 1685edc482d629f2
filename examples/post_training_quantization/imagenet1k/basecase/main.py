"""Post-training quantization of an ImageNet CNN for TensorRT, with every observer of activations.

python main.py                                                  generated pictures, seconds
python main.py --data /data/imagenet --samples 1024 --epochs 0 --size 224 \\
    --model torchvision:resnet18 --weights resnet18.pth         folders train/CLASS and val/CLASS
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from helpers import loops
from helpers.nets import ResNet, start

import sparsebit

OBSERVERS = ("minmax", "mse", "percentile", "moving_average", "aciq", "kl_histogram")


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = loops.parser(__doc__, __file__, samples=600, epochs=4)
    parser.add_argument("--observers", nargs="+", default=OBSERVERS, help="of activations, to compare")
    net = lambda size: ResNet(widths=(8, 16, 32, 64), patch=4)
    args, model, (x, _, x_test, y_test) = start(parser, arguments, net, size=64)

    results: dict[str, float] = {}
    config = sparsebit.QuantConfig.load(args.config)
    for observer in args.observers:
        qmodel = sparsebit.quantize(model, x[:256].split(32), config.override("A.OBSERVER.TYPE", observer))
        found = loops.compare(model, qmodel, x_test, y_test)
        results |= {name.replace("quantized", observer): value for name, value in found.items()}
    loops.export(qmodel, x[:8], args.onnx)
    return loops.show(results)


if __name__ == "__main__":
    main()
