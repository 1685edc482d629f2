"""Post-training quantization of a vision transformer (DeiT), and which of its layers hurt most.

python main.py                                                  generated pictures, seconds
python main.py --data /data/imagenet --samples 1024 --epochs 0 --size 224 \\
    --model timm:deit_tiny_patch16_224 --weights deit_tiny.pth  folders train/CLASS and val/CLASS
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from helpers import loops
from helpers.nets import DeiT, start

import sparsebit


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = loops.parser(__doc__, __file__, samples=800, epochs=6)
    net = lambda size: DeiT(size=size)
    args, model, (x, _, x_test, y_test) = start(parser, arguments, net, size=64, lr=2e-3)

    qmodel = sparsebit.quantize(model, x[:256].split(32), args.config)
    print(qmodel.profile(x[:8]))  # layers by the noise they add to the output, and what would help each

    loops.export(qmodel, x[:8], args.onnx)
    return loops.show(loops.compare(model, qmodel, x_test, y_test))


if __name__ == "__main__":
    main()
