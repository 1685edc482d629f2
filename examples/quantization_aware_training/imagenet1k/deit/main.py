"""Quantization-aware training of a vision transformer with 4 bits (LSQ; LSQ+ behind GELU).

python main.py                                                  generated pictures, seconds
python main.py --data /data/imagenet --samples 100000 --epochs 0 --size 224 \\
    --model timm:deit_tiny_patch16_224 --weights deit_tiny.pth  folders train/CLASS and val/CLASS
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from helpers import loops
from helpers.nets import DeiT, start
from helpers.qat import train_quantized


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = loops.with_training(
        loops.parser(__doc__, __file__, samples=640, epochs=5), 2, "with quantization"
    )
    args, model, split = start(parser, arguments, lambda size: DeiT(size=size), size=64, lr=2e-3)

    score = lambda net: loops.accuracy(net, *split[2:])
    qmodel, results = train_quantized(model, args.config, split[:2], args.more_epochs, 5e-4, score)
    loops.export(qmodel, split[0][:8], args.onnx)
    return loops.show(results)


if __name__ == "__main__":
    main()
