"""Unstructured pruning of a CIFAR-10 ResNet: four of five weights become zero, a bit more with every step of training.

python main.py                                                  generated pictures, seconds
python main.py --data cifar-10-batches-bin --samples 50000 --epochs 30 --more-epochs 10
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from typing import Any

import torch
from helpers import loops
from helpers.nets import ResNet, start
from torch import Tensor

from sparsebit.sparse import Schedule, SparseModel, parse_sconfig


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = loops.parser(__doc__, __file__, samples=800, epochs=4, config="sconfig.yaml")
    loops.with_training(parser, 3, "while weights go")
    net = lambda size: ResNet(widths=(8, 16, 32))
    args, model, (x, y, x_test, y_test) = start(parser, arguments, net, size=32)
    results = {"float %": loops.accuracy(model, x_test, y_test)}

    smodel = SparseModel(model, parse_sconfig(args.config), x[:2])
    smodel.calc_params()
    results["all at once %"] = loops.accuracy(smodel, x_test, y_test)

    steps = args.more_epochs * -(-len(x) // 32)
    schedule = Schedule(smodel, steps=max(steps // 2, 1), every=4)  # the second half trains what is left

    def loss(net: Any, pictures: Tensor, labels: Tensor) -> Tensor:
        schedule.step()
        return loops.classify(net, pictures, labels)

    loops.fit(smodel, (x, y), args.more_epochs, lr=2e-3, loss=loss)
    results["step by step %"] = loops.accuracy(smodel, x_test, y_test)
    sparse = smodel.compact()  # the same shapes, with zeros
    weights = torch.cat([p.flatten() for p in sparse.parameters() if p.dim() > 1])
    results["zeros %"] = (weights == 0).float().mean().item() * 100
    loops.export(smodel, x[:8], args.onnx)
    return loops.show(results)


if __name__ == "__main__":
    main()
