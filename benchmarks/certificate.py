"""The certificate of MobileNetV2 W8A8 (needs SPARSEBIT_ASSETS and the onnx extra): export the default, run the file.

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
    qmodel = sparsebit.quantize(assets.mobilenet_v2(), list(calibration.split(25)), progress=False)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "mobilenet_v2.onnx")
        axes = {"x": {0: "batch"}}
        print(qmodel.export_onnx(x[:4], file, ["x"], dynamic_axes=axes, batches=list(x.split(50))))


if __name__ == "__main__":
    main()
