"""Quantization-aware training of a CIFAR-10 ResNet with 3-bit weights and activations (LSQ).

python main.py                                                  generated pictures, seconds
python main.py qconfig_pact.yaml                                PACT in place of LSQ
python main.py --data cifar-10-batches-bin --samples 50000 --epochs 30 --more-epochs 30
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from helpers import loops
from helpers.nets import ResNet, start
from helpers.qat import train_quantized


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = loops.with_training(
        loops.parser(__doc__, __file__, samples=800, epochs=4), 3, "with quantization"
    )
    net = lambda size: ResNet(widths=(8, 16, 32))
    args, model, (x, y, x_test, y_test) = start(parser, arguments, net, size=32)

    score = lambda net: loops.accuracy(net, x_test, y_test)
    qmodel, results = train_quantized(model, args.config, (x, y), args.more_epochs, 2e-3, score)
    loops.export(qmodel, x[:8], args.onnx)
    return loops.show(results)


if __name__ == "__main__":
    main()
