"""Quantization-aware training of an ImageNet CNN with 4 bits, first and last layer 8 (LSQ); the float net teaches.

python main.py                                                  generated pictures, seconds
python main.py --data /data/imagenet --samples 100000 --epochs 0 --size 224 \\
    --model torchvision:resnet18 --weights resnet18.pth         folders train/CLASS and val/CLASS
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from typing import Any

from helpers import loops
from helpers.nets import ResNet, start
from helpers.qat import train_quantized
from torch import Tensor

from sparsebit import qat


def distil(model: Any, x: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
    return qat.distillation_loss(model(x), teacher, labels, temperature=2.0, alpha=0.7)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = loops.with_training(
        loops.parser(__doc__, __file__, samples=600, epochs=4), 3, "with quantization"
    )
    net = lambda size: ResNet(widths=(8, 16, 32, 64), patch=4)
    args, model, (x, y, x_test, y_test) = start(parser, arguments, net, size=64)

    taught = x, y, loops.outputs(model, x)  # the teacher's logits, once for all epochs
    score = lambda net: loops.accuracy(net, x_test, y_test)
    qmodel, results = train_quantized(model, args.config, taught, args.more_epochs, 2e-3, score, distil)
    loops.export(qmodel, x[:8], args.onnx)
    return loops.show(results)


if __name__ == "__main__":
    main()
