"""Post-training quantization of a YOLO-style detector: two outputs, LeakyReLU, upsampling, concatenation.

python main.py                                                  generated squares, seconds
python main.py --data /data/coco --size 416 --samples 5000 --epochs 50
                                                                annotations/instances_{train,val}2017.json beside
                                                                train2017 and val2017
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from dataset import coco, squares
from helpers import loops
from model import Yolo, decode, loss, mean_average_precision, targets

import sparsebit


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = loops.parser(__doc__, __file__, samples=320, epochs=8, model="")
    parser.add_argument("--size", type=int, default=64, help="of the pictures (default 64; COCO 416)")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    if args.data is None:
        (x, boxes), (x_test, truth) = squares(args.samples, args.size, 0), squares(64, args.size, 1)
        classes = 3
    else:
        x, boxes = coco(args.data, "train2017", args.size, args.samples)
        x_test, truth = coco(args.data, "val2017", args.size, args.samples)
        classes = 80
    model = Yolo(classes)
    if args.weights:
        model.load_state_dict(torch.load(args.weights, map_location="cpu", weights_only=True))
    loops.fit(model, (x, *targets(boxes, args.size, classes)), args.epochs, lr=1e-2, loss=loss)

    qmodel = sparsebit.quantize(model, x[:128].split(32), args.config)

    @torch.no_grad()
    def score(net: torch.nn.Module) -> float:
        return mean_average_precision(decode(net(x_test)), truth, classes)

    with torch.no_grad():
        pairs = zip(model(x_test), qmodel(x_test))
    results = {"float mAP50 %": score(model), "quantized mAP50 %": score(qmodel)}
    results |= {f"head {i} dB": loops.sqnr(exact, got) for i, (exact, got) in enumerate(pairs)}
    loops.export(qmodel, x[:2], args.onnx)
    return loops.show(results)


if __name__ == "__main__":
    main()
