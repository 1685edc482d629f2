"""Write the file of another tool. Runs in the venv of that tool.

    python write_peer.py TOOL FLOAT_FILE BATCHES FILE [--attention]

nncf, nncf-mixed                 NNCF, its presets PERFORMANCE (the default) and MIXED
openvino-nncf, -nncf-mixed       NNCF on the model as OpenVINO reads it, in OpenVINO's format: for --runtime openvino
static-minmax, static-reduced    onnxruntime's quantize_static after quant_pre_process: min/max; with reduce_range
static-percentile, -entropy      the same with these ranges
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from real.feeds import Batch, load_batches

FEW = 24  # samples for the histograms of quantize_static, which keep every tensor of a batch


def samples(args: argparse.Namespace) -> list[Batch]:
    """The calibration data, one sample at a time, by the names of the file's inputs."""
    import onnx

    names = [given.name for given in onnx.load(args.float, load_external_data=False).graph.input]
    batches = [dict(zip(names, batch.values())) for batch in load_batches(args.batches)]
    return [
        {name: value[i : i + 1] for name, value in batch.items()}
        for batch in batches
        for i in range(len(batch[names[0]]))
    ]


def nncf_file(args: argparse.Namespace) -> None:
    import onnx

    onnx.save(by_nncf(args, onnx.load(args.float), samples(args)), args.file)


def openvino_file(args: argparse.Namespace) -> None:
    import openvino

    singles = [
        [value[i : i + 1] for value in batch.values()]
        for batch in load_batches(args.batches)
        for i in range(len(next(iter(batch.values()))))
    ]
    model = by_nncf(args, openvino.Core().read_model(args.float), singles)
    openvino.save_model(model, args.file, compress_to_fp16=False)


def by_nncf(args: argparse.Namespace, model: Any, batches: list[Any]) -> Any:
    import nncf

    preset = (
        nncf.QuantizationPreset.MIXED if args.tool.endswith("mixed") else nncf.QuantizationPreset.PERFORMANCE
    )
    return nncf.quantize(
        model,
        nncf.Dataset(batches),
        subset_size=len(batches),
        preset=preset,
        model_type=nncf.ModelType.TRANSFORMER if args.attention else None,
    )


def ranged(batches: list[Batch]) -> object:
    """The batches as quantize_static reads them, one stride after the other."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(batches)

        def __len__(self) -> int:
            return len(batches)

        def set_range(self, start_index: int, end_index: int) -> None:
            self.left = iter(batches[start_index:end_index])

        def get_next(self) -> Batch | None:
            return next(self.left, None)

    return Reader()


def static_file(args: argparse.Namespace) -> None:
    from onnxruntime import quantization as tool
    from onnxruntime.quantization.shape_inference import quant_pre_process

    methods = {
        "static-percentile": tool.CalibrationMethod.Percentile,
        "static-entropy": tool.CalibrationMethod.Entropy,
    }
    method = methods.get(args.tool, tool.CalibrationMethod.MinMax)
    batches = samples(args)
    if method is not tool.CalibrationMethod.MinMax:
        batches = batches[:: -(-len(batches) // FEW)]
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder, "prepared.onnx")
        try:
            quant_pre_process(str(args.float), str(prepared))
        except Exception:  # its shape inference knows fewer ops than onnxruntime runs
            quant_pre_process(str(args.float), str(prepared), skip_symbolic_shape=True)
        tool.quantize_static(
            str(prepared),
            str(args.file),
            ranged(batches),
            quant_format=tool.QuantFormat.QDQ,
            per_channel=True,
            reduce_range=args.tool == "static-reduced",
            activation_type=tool.QuantType.QUInt8,
            weight_type=tool.QuantType.QInt8,
            calibrate_method=method,
            extra_options={"CalibStridedMinMax": 1},
        )


WRITERS: dict[str, Callable[[argparse.Namespace], None]] = {
    "nncf": nncf_file,
    "nncf-mixed": nncf_file,
    "openvino-nncf": openvino_file,
    "openvino-nncf-mixed": openvino_file,
    "static-minmax": static_file,
    "static-reduced": static_file,
    "static-percentile": static_file,
    "static-entropy": static_file,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tool", choices=list(WRITERS))
    for name in ("float", "batches", "file"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--attention", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    WRITERS[args.tool](args)


if __name__ == "__main__":
    main()
