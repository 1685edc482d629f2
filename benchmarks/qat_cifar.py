"""Quantization-aware training of ResNet-20 on CIFAR-10 from its pretrained weights (needs SPARSEBIT_ASSETS).

    python benchmarks/qat_cifar.py [--rows "lsq W4A4" w3a3-qat ...] [--epochs 3] [--steps N] [--plain]

A row is a quantizer with bits, or a preset. First and last layer have 8 bits, and so has the pool in front of the
last. 20,000 training images, the full test set;
the float network is the teacher, by its logits and by what its blocks read (sparsebit.qat).
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import assets
import sparsebit

BATCH = 100
EMA = 0.997  # of the running mean of the parameters
RECIPE = {  # bits -> learning rate, images per step, weight of the distance inside the network
    2: (0.04, 100, 5.0),
    3: (0.01, 50, 5.0),
    4: (0.01, 50, 5.0),
}
ROWS = ["lsq W4A4", "lsq W3A3", "lsq W2A2", "lsq+ W4A4", "lsq+ W2A2", "pact W4A4", "pact W2A2", "dorefa W4A4"]
QUANTIZERS = {  # name -> of weights, of activations
    "lsq": ("lsq", "lsq"),
    "lsq+": ("lsq+", "lsq+"),
    "pact": ("uniform", "pact"),
    "dorefa": ("dorefa", "uniform"),
    "uniform": ("uniform", "uniform"),
}


def config(row: str) -> dict[str, object] | str:
    """`lsq W4A4` -> the config; the grid starts where the rounding error of the data is least. A preset is itself."""
    if " " not in row:
        return row
    name, bits = row.split()
    w_type, a_type = QUANTIZERS[name]
    outer = [{"conv1": ["QUANTIZER.BIT", 8]}, {"linear": ["QUANTIZER.BIT", 8]}]
    pool = [{"avg_pool2d": ["QUANTIZER.BIT", 8]}]  # its input is the last layer's, before the mean
    scheme = {"W": "per-channel-symmetric", "A": "per-tensor-affine"}
    sections = {
        letter: {
            "QSCHEME": scheme[letter],
            "QUANTIZER": {"TYPE": kind, "BIT": int(bits[1 + 2 * i])},
            "OBSERVER": {"TYPE": "mse"},
            "SPECIFIC": outer if letter == "W" else outer + pool,
        }
        for i, (letter, kind) in enumerate((("W", w_type), ("A", a_type)))
    }
    return {"BACKEND": "virtual", **sections}


def bits_of(row: str) -> int:
    """Of the activations: 3 of `lsq W4A3` and of `w4a3-qat`."""
    return int(re.findall(r"\d", row)[-1])


def batches(
    x: Tensor, y: Tensor, epochs: int, size: int = BATCH, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled, flipped, and each image shifted by up to four pixels."""
    g, side, channels = (
        torch.Generator().manual_seed(seed),
        torch.arange(x.shape[-1]),
        torch.arange(x.shape[1]),
    )
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=g).split(size):
            images = x[index]
            flip = torch.rand(len(index), generator=g) < 0.5
            images[flip] = images[flip].flip(3)
            down, right = torch.randint(0, 9, (2, len(index)), generator=g)
            rows, columns = (
                (down[:, None] + side)[:, None, :, None],
                (right[:, None] + side)[:, None, None, :],
            )
            which = torch.arange(len(index))[:, None, None, None]
            yield F.pad(images, (4, 4, 4, 4))[which, channels[:, None, None], rows, columns], y[index]


def build(row: str, net: nn.Module, x: Tensor) -> sparsebit.QuantModel:
    qmodel = sparsebit.QuantModel(net, config(row))
    qmodel.prepare_calibration(asym=False)
    with torch.no_grad():
        for images in x[:256].split(64):
            qmodel(images)
    qmodel.init_QAT()
    return qmodel


def train(
    qmodel: sparsebit.QuantModel,
    teacher: nn.Module,
    x: Tensor,
    y: Tensor,
    epochs: int,
    steps: int | None,
    bits: int,
    plain: bool = False,
) -> list[Tensor]:
    """Trains, and returns the running mean of the parameters, which is a model of its own.

    plain   cross entropy with the labels only: no teacher.
    """
    lr, size, inner = RECIPE[bits]
    total = steps or epochs * -(-len(x) // size)
    groups = qmodel.qat_parameter_groups(lr, weight_decay=1e-4)
    optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [g["lr"] for g in groups], total, pct_start=0.1, cycle_momentum=False
    )
    inside = [n for n, _ in teacher.named_modules() if n.startswith("layer") and n.endswith("conv1")]
    match = sparsebit.qat.FeatureMatch(qmodel, teacher, [*inside, "linear"])
    learned = [p for p in qmodel.parameters() if p.requires_grad]
    mean = [p.detach().clone() for p in learned]
    qmodel.train()
    for step, (images, labels) in enumerate(batches(x, y, epochs, size)):
        if step == total:
            break
        with torch.no_grad():
            wanted = teacher(images)
        answer = qmodel(images)
        if plain:
            loss = F.cross_entropy(answer, labels)
        else:
            loss = sparsebit.qat.distillation_loss(answer, wanted, temperature=1.0) + inner * match.loss()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            torch._foreach_lerp_(mean, learned, 1 - min(EMA, (step + 1) / (step + 10)))
    match.remove()
    qmodel.eval()
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="stop after that many steps")
    parser.add_argument("--plain", action="store_true", help="labels only, no teacher")
    parser.add_argument("--export", help="also write <row>.onnx into this folder, with its certificate")
    options = parser.parse_args()
    net = assets.cifar_resnet(20)
    x, y = assets.cifar10("train20k")
    test_x, test_y = assets.cifar10("test")
    print(f"float {assets.top1(assets.logits(net, test_x), test_y):.2f} %", flush=True)
    for row in options.rows:
        start = time.process_time()
        qmodel = build(row, net, x)
        before = assets.top1(assets.logits(qmodel, test_x), test_y)
        mean = train(qmodel, net, x, y, options.epochs, options.steps, bits_of(row), options.plain)
        after = assets.top1(assets.logits(qmodel, test_x), test_y)
        with torch.no_grad():
            for p, average in zip((p for p in qmodel.parameters() if p.requires_grad), mean):
                p.copy_(average)
        # the statistics of the batch norms belong to the weights before the average
        torch.optim.swa_utils.update_bn(batches(x[:5000], y, 1), qmodel)
        averaged = assets.top1(assets.logits(qmodel, test_x), test_y)
        line = f"{row:12s} calibrated {before:.2f} %, trained {after:.2f} %, mean of the weights {averaged:.2f} %"
        if options.export:
            qmodel.fold_batchnorm()
            report = qmodel.export_onnx(test_x[:50], f"{options.export}/{row.replace(' ', '-')}.onnx")
            folded = assets.top1(assets.logits(qmodel, test_x), test_y)
            line += f", folded {folded:.2f} %, certified: {report.ok}, {dict(report.integer)}"
        print(f"{line}, {time.process_time() - start:.0f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
