"""Post-training quantization of a CIFAR-10 ResNet: train in float, calibrate, compare.

python main.py                                                  generated pictures, seconds
python main.py --data cifar-10-batches-bin --samples 50000 --epochs 30
python main.py qconfig.yaml --onnx resnet.onnx                  also write the file, run and compared
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from helpers import loops
from helpers.nets import ResNet, start

import sparsebit


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = loops.parser(__doc__, __file__, samples=800, epochs=4)
    net = lambda size: ResNet(widths=(8, 16, 32))
    args, model, (x, _, x_test, y_test) = start(parser, arguments, net, size=32)

    qmodel = sparsebit.quantize(model, x[:256].split(32), args.config)
    print(qmodel.preflight(x[:1]))  # every op: quantized with what, or float and why

    loops.export(qmodel, x[:8], args.onnx)
    return loops.show(loops.compare(model, qmodel, x_test, y_test))


if __name__ == "__main__":
    main()
