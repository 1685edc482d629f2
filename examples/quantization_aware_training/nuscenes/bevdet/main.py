"""Quantization-aware training of a bird's-eye-view detector with 4 bits: several inputs, one of them indices.

python main.py                                                  generated scenes, seconds
python main.py --data scenes.npz --samples 10000 --epochs 20    arrays that you made from nuScenes, see dataset.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from dataset import arrays, bars
from helpers import loops
from helpers.qat import train_quantized
from model import BevDet, f1, loss


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = loops.parser(__doc__, __file__, samples=320, epochs=10, model="")
    loops.with_training(parser, 4, "with quantization")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    if args.data is None:
        data, held_out = bars(args.samples, 0), bars(100, 1)
    else:
        scenes = arrays(args.data, args.samples)
        cut = len(scenes[0]) * 9 // 10
        data, held_out = tuple(part[:cut] for part in scenes), tuple(part[cut:] for part in scenes)
    model = BevDet()
    if args.weights:
        model.load_state_dict(torch.load(args.weights, map_location="cpu", weights_only=True))
    loops.fit(model, data, args.epochs, lr=1e-2, loss=loss)

    score = lambda net: f1(loops.outputs(net, *held_out[:2]), held_out[2])
    qmodel, results = train_quantized(model, args.config, data, args.more_epochs, 2e-3, score, loss)
    print("ops that stay float:", ", ".join(sorted(set(qmodel.float_ops.values()))) or "none")
    loops.export(qmodel, tuple(part[:2] for part in data[:2]), args.onnx)
    return loops.show(results)


if __name__ == "__main__":
    main()
