"""Structured pruning of a CIFAR-10 ResNet: half of the channels leave, the rest trains on, then 8 bits.

python main.py                                                  generated pictures, seconds
python main.py --data cifar-10-batches-bin --samples 50000 --epochs 30 --more-epochs 10
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from helpers import loops
from helpers.nets import ResNet, start
from torch import nn

import sparsebit
from sparsebit.sparse import SparseModel, parse_sconfig


def kilo_parameters(model: nn.Module) -> float:
    return sum(p.numel() for p in model.parameters()) / 1000


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = loops.parser(__doc__, __file__, samples=800, epochs=4, config="sconfig.yaml")
    loops.with_training(parser, 2, "after the cut")
    net = lambda size: ResNet(widths=(8, 16, 32))
    args, model, (x, y, x_test, y_test) = start(parser, arguments, net, size=32)
    results = {"float %": loops.accuracy(model, x_test, y_test)}

    batches = x[:256].split(32)
    smodel = SparseModel(model, parse_sconfig(args.config), x[:2])
    smodel.calibrate(batches)
    smodel.calc_params()  # masks: which channels go
    smodel.refit(batches)  # layers that read less come as close to the model before as they can
    small = smodel.compact()  # an ordinary module without them
    print(small.pruning_plan)
    results["after the cut %"] = loops.accuracy(small, x_test, y_test)

    loops.fit(small, (x, y), args.more_epochs, lr=2e-3)
    results["trained on %"] = loops.accuracy(small, x_test, y_test)
    qmodel = sparsebit.quantize(small, batches)
    results["in 8 bits %"] = loops.accuracy(qmodel, x_test, y_test)
    results |= {"parameters / 1000": kilo_parameters(model), "left / 1000": kilo_parameters(small)}
    loops.export(qmodel, x[:8], args.onnx)
    return loops.show(results)


if __name__ == "__main__":
    main()
