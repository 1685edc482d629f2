"""Which layers need 8 bits? Round one weight at a time to 4 bits, measure the damage, keep the worst at 8.

python examples/mixed_precision.py        (a few seconds; needs scikit-learn: pip install 'sparsebit[demo]')
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import sparsebit
from sparsebit.cli.demo import DigitNet, accuracy, digits, train, weight_bytes

KEEP = 2  # layers that stay at 8 bits


@torch.no_grad()
def sqnr(exact: Tensor, x: Tensor) -> float:
    """Signal to quantization noise, in dB: sharper than accuracy, and it needs no labels."""
    return (10 * torch.log10(exact.square().sum() / (exact - x).square().sum())).item()


@torch.no_grad()
def sensitivity(qmodel: sparsebit.QuantModel, x: Tensor) -> dict[str, float]:
    """Layer -> dB that are left when only its weight is quantized; the worst first."""
    qmodel.set_quant(w_quant=False, a_quant=False)
    exact, left = qmodel(x), {}
    for name, layer in qmodel.model.named_modules():
        if getattr(layer, "weight_quantizer", None) is None:
            continue
        layer.set_quant(w_quant=True)
        left[name] = sqnr(exact, qmodel(x))
        layer.set_quant(w_quant=False)
    return dict(sorted(left.items(), key=lambda item: item[1]))


def compare(
    net: nn.Module, batches: list[Tensor], x: Tensor, y: Tensor
) -> dict[str, tuple[float, float, float]]:
    """Config -> (accuracy %, dB, kB of weights)."""
    probe = sparsebit.quantize(net, batches, "w4a8")
    left = sensitivity(probe, torch.cat(batches))
    print("dB left when only this weight has 4 bits:")
    for name, value in left.items():
        print(f"  {name:16}{value:6.1f}")
    worst = [{name: ["QUANTIZER.BIT", 8]} for name in list(left)[:KEEP]]
    configs = {
        "w8a8": sparsebit.QuantConfig.load("w8a8"),
        "mixed": sparsebit.QuantConfig.load("w4a8").override("W.SPECIFIC", worst),
        "w4a8": sparsebit.QuantConfig.load("w4a8"),
    }
    results = {}
    for name, config in configs.items():
        qmodel = sparsebit.quantize(net, batches, config)
        with torch.no_grad():
            results[name] = (accuracy(qmodel, x, y), sqnr(net(x), qmodel(x)), weight_bytes(qmodel) / 1000)
    return results


def main(epochs: int = 5) -> dict[str, tuple[float, float, float]]:
    torch.manual_seed(0)
    x, y, x_test, y_test = digits()
    net = DigitNet()
    train(net, x, y, epochs)
    print(f"float: {accuracy(net, x_test, y_test):.2f} %")
    results = compare(net, list(x[:256].split(64)), x_test, y_test)
    for name, (percent, decibel, size) in results.items():
        print(f"{name:6} {percent:6.2f} % {decibel:6.1f} dB {size:6.1f} kB")
    return results


if __name__ == "__main__":
    main()
