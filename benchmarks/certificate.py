"""The certificate of MobileNetV2 W8A8 on 750 images (needs SPARSEBIT_ASSETS and the onnx extra): export, run the file.

python benchmarks/certificate.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import assets
import sparsebit


def main() -> None:
    if assets.MISSING:
        sys.exit(assets.MISSING)
    calibration, x, _ = assets.split_imagenet()
    default = sparsebit.QuantConfig.load("w8a8")
    best = default.override("W.OBSERVER.TYPE", "mse", "A.OBSERVER.MEAN_MINMAX.MIN_VALUES", 1)
    for name, config in (("the default", default), ("W by mse, ranges as the mean of single images", best)):
        qmodel = sparsebit.quantize(
            assets.mobilenet_v2(), list(calibration.split(25)), config, progress=False
        )
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "mobilenet_v2.onnx")
            axes = {"x": {0: "batch"}}  # the dummy is compared too: 2 + 748 images
            report = qmodel.export_onnx(x[:2], file, ["x"], dynamic_axes=axes, batches=list(x[2:].split(44)))
        print(f"{name}:\n{report}\n", flush=True)


if __name__ == "__main__":
    main()
