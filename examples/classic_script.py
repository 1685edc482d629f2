"""The call sequence of the original Sparsebit, with a YAML file of your own or the one below.

python examples/classic_script.py [qconfig.yaml]        (a few seconds; needs scikit-learn)
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from sparsebit.cli.demo import DigitNet, accuracy, digits, train
from sparsebit.quantization import QuantModel, parse_qconfig

QCONFIG = """
BACKEND: virtual
SCHEDULE: {FUSE_BN: true}
W:
  QSCHEME: per-channel-symmetric
  QUANTIZER: {TYPE: uniform, BIT: 4}
  OBSERVER: {TYPE: MSE}
  SPECIFIC:
    - "stem*": [QUANTIZER.BIT, 8]
    - "fc": [QUANTIZER.BIT, 8]
A:
  QSCHEME: per-tensor-affine
  QUANTIZER: {TYPE: uniform, BIT: 8}
  OBSERVER: {TYPE: PERCENTILE, LAYOUT: NCHW, PERCENTILE: {ALPHA: 0.001}}
"""


def main(config_file: str | Path, epochs: int = 5) -> dict[str, float]:
    torch.manual_seed(0)
    x, y, x_test, y_test = digits()
    model = DigitNet()
    train(model, x, y, epochs)

    config = parse_qconfig(str(config_file))
    qmodel = QuantModel(model, config=config).to(config.DEVICE)
    qmodel.eval()
    qmodel.prepare_calibration()
    with torch.no_grad():
        for batch in x[:256].split(64):
            qmodel(batch.to(config.DEVICE))
    qmodel.calc_qparams(asym=True)  # each layer behind its quantized predecessors
    qmodel.set_quant(w_quant=True, a_quant=True)
    print(qmodel)

    with tempfile.TemporaryDirectory() as folder:
        qmodel.save(folder)
        loaded = QuantModel.load(folder, model).to(config.DEVICE).eval()
    x_test, y_test = x_test.to(config.DEVICE), y_test.to(config.DEVICE)
    results = {
        "float": accuracy(model.to(config.DEVICE), x_test, y_test),
        "quantized": accuracy(qmodel, x_test, y_test),
        "loaded": accuracy(loaded, x_test, y_test),
    }
    for name, percent in results.items():
        print(f"{name:10}{percent:6.2f} %")
    return results


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "qconfig.yaml"
            path.write_text(QCONFIG)
            main(path)
