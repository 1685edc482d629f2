"""ONNX files with free shapes become files with fixed shapes, with onnxruntime's basic optimisations."""

from __future__ import annotations

import tempfile
from pathlib import Path


def fixed(source: Path, shapes: dict[str, list[int]], file: Path) -> None:
    import onnx
    import onnxruntime
    from onnxruntime.tools.onnx_model_utils import make_input_shape_fixed

    model = onnx.load(source)
    for name, shape in shapes.items():
        make_input_shape_fixed(model.graph, name, shape)
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "fixed.onnx")
        onnx.save(model, given)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(file)
        onnxruntime.InferenceSession(str(given), options, providers=["CPUExecutionProvider"])
