"""Run a file on batches, as users load it. Its own process: needs numpy and onnxruntime (or openvino) alone.

    python run_file.py FILE BATCHES OUTPUTS [--runtime openvino] [--threads 1]

SPARSEBIT_ORT_SITE names a folder that is put first on sys.path: another onnxruntime, for a stand-in of another CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if os.environ.get("SPARSEBIT_ORT_SITE"):
    sys.path.insert(0, os.environ["SPARSEBIT_ORT_SITE"])
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import numpy as np

from real.feeds import Array, Batch, load_batches, save_outputs

Run = Callable[[Batch], list[Array]]


def onnxruntime_of(file: Path, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    return lambda batch: session.run(None, dict(zip(names, batch.values())))


def openvino_of(file: Path, threads: int) -> Run:
    import openvino

    core = openvino.Core()
    how = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    model = core.compile_model(core.read_model(str(file)), "CPU", how)
    request = model.create_infer_request()

    def run(batch: Batch) -> list[Array]:
        found = request.infer(list(batch.values()), share_inputs=True)
        return [np.array(found[output]) for output in model.outputs]

    return run


RUNTIMES: dict[str, Callable[[Path, int], Run]] = {"onnxruntime": onnxruntime_of, "openvino": openvino_of}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("file", "batches", "outputs"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--runtime", choices=list(RUNTIMES), default="onnxruntime")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    run = RUNTIMES[args.runtime](args.file, args.threads)
    found: list[Any] = [run(batch) for batch in load_batches(args.batches)]
    save_outputs(args.outputs, [np.concatenate(part) for part in zip(*found)])


if __name__ == "__main__":
    main()
