"""Our W8A8 file beside the one that onnxruntime's own `quantize_static` makes of the same float model and data.

    python benchmarks/onnxruntime_speed.py [--models resnet18 mobilenet_v2] [--rounds 30]

Bars: run time at most 1.05 x theirs; every Conv, Gemm and Add of both in integers; W8A8 at most 0.27 of the float
file, int4 weights at most 0.14. One thread, the files run in turn, the best round of each counts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import torch
from onnxruntime import quantization as peer
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn

import assets
import sparsebit
from calibration import resnet18

MOST = {"time": 1.05, "w8a8": 0.27, "w4": 0.14}
MATTERS = ("Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "Add")


class Reader(peer.CalibrationDataReader):
    """Calibration data the way onnxruntime's tool takes it: one image at a time."""

    def __init__(self, data: list[Tensor]):
        self.images: Iterator[Tensor] = iter(torch.cat(data).split(1))

    def get_next(self) -> dict[str, Any] | None:
        image = next(self.images, None)
        return None if image is None else {"x": image.numpy()}


def model_and_data(name: str, images: int) -> tuple[nn.Module, list[Tensor]]:
    if name == "mobilenet_v2" and not assets.MISSING:
        return assets.mobilenet_v2(), list(assets.split_imagenet()[0][:images].split(8))
    torch.manual_seed(0)
    net = resnet18() if name == "resnet18" else assets.mobilenet_v2(pretrained=False)
    return net, list(torch.randn(images, 3, 224, 224).split(8))


def write_files(net: nn.Module, data: list[Tensor], folder: Path) -> dict[str, Path]:
    """The float file, theirs, and ours with 8-bit and with 4-bit weights."""
    files = {
        key: folder / f"{key}.onnx" for key in ("float", "prepared", "theirs", "theirs-int8", "w8a8", "w4")
    }
    image = data[0][:1]
    options: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False}
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(net, (image,), str(files["float"]), input_names=["x"], **options)
        quant_pre_process(str(files["float"]), str(files["prepared"]))
        for key, kind in (("theirs", peer.QuantType.QUInt8), ("theirs-int8", peer.QuantType.QInt8)):
            peer.quantize_static(
                *(str(files["prepared"]), str(files[key]), Reader(data)),
                quant_format=peer.QuantFormat.QDQ,
                per_channel=True,
                activation_type=kind,
                weight_type=peer.QuantType.QInt8,
            )
    for preset in ("w8a8", "w4"):
        qmodel = sparsebit.quantize(net, data, preset, progress=False)
        qmodel.export_onnx(image, str(files[preset]), ["x"])
    return files


def session(file: Path, save: Path | None = None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if save is not None:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(save)
    return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def best_times(files: dict[str, Path], image: Tensor, rounds: int) -> dict[str, float]:
    """Milliseconds; the files take turns, so that they see the same machine."""
    sessions, feed = {key: session(file) for key, file in files.items()}, {"x": image.numpy()}
    best = dict.fromkeys(files, float("inf"))
    for _ in range(rounds):
        for key, run in sessions.items():
            start = time.perf_counter()
            run.run(None, feed)
            best[key] = min(best[key], (time.perf_counter() - start) * 1000)
    return best


def kernels(file: Path) -> tuple[Counter[str], list[str]]:
    """Ops of the optimised graph, and the Conv, Gemm and Add among them that are not integer."""
    optimised = file.with_suffix(".optimised.onnx")
    session(file, save=optimised)
    nodes = onnx.load(str(optimised), load_external_data=False).graph.node
    return Counter(n.op_type for n in nodes), [f"{n.op_type} {n.name}" for n in nodes if n.op_type in MATTERS]


def bar(value: float, most: float) -> str:
    return f"{value:.3f} (bar {most}{'' if value <= most else ', MISSED'})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["resnet18", "mobilenet_v2"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--images", type=int, default=32, help="to calibrate on")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # torch's exporter and onnxruntime's tool talk a lot
    print(f"onnxruntime {ort.__version__}, torch {torch.__version__}, one thread, 1x3x224x224")
    for name in args.models:
        net, data = model_and_data(name, args.images)
        with tempfile.TemporaryDirectory() as folder:
            files = write_files(net, data, Path(folder))
            size = {key: file.stat().st_size for key, file in files.items()}
            timed = {key: files[key] for key in ("float", "theirs", "theirs-int8", "w8a8")}
            best = best_times(timed, data[0][:1], args.rounds)
            print(f"\n{name}\n  ms: " + ", ".join(f"{key} {ms:.2f}" for key, ms in best.items()))
            fastest = min(best["theirs"], best["theirs-int8"])
            print(f"  time w8a8 / theirs (the faster one) {bar(best['w8a8'] / fastest, MOST['time'])}")
            for key in ("w8a8", "w4"):
                print(f"  size {key} / float {bar(size[key] / size['float'], MOST[key])}")
            print(f"  size theirs / float {size['theirs'] / size['float']:.3f}")
            for key in ("theirs", "w8a8"):
                found, floats = kernels(files[key])
                print(f"  {key}: " + ", ".join(f"{n} {op}" for op, n in sorted(found.items())))
                print(f"  {key}: not integer: " + (", ".join(floats) or "none"), flush=True)


if __name__ == "__main__":
    main()
