"""ONNX files as every tool can take them: fixed shapes, opset 13, onnxruntime's basic optimisations.

Below opset 13 neither NNCF nor quantize_static can write scales per channel.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

OPSET = 13


def fixed(source: Path, shapes: dict[str, list[int]], file: Path) -> None:
    import onnx
    import onnxruntime
    from onnx.version_converter import convert_version
    from onnxruntime.tools.onnx_model_utils import make_input_shape_fixed

    model = onnx.load(source)
    for name, shape in shapes.items():
        make_input_shape_fixed(model.graph, name, shape)
    if model.opset_import[0].version < OPSET:
        model = convert_version(model, OPSET)
    for node in model.graph.node:
        write_padding_down(node)
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "fixed.onnx")
        onnx.save(model, given)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(file)
        onnxruntime.InferenceSession(str(given), options, providers=["CPUExecutionProvider"])
    model = onnx.load(file)
    used = {node.domain for node in model.graph.node}
    kept = [opset for opset in model.opset_import if opset.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    onnx.save(model, file)


def write_padding_down(node: Any) -> None:
    """SAME_UPPER, which onnx2torch does not know, as numbers."""
    import onnx.helper

    given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    if given.get("auto_pad") != b"SAME_UPPER":
        return
    if {*given.get("strides", [1]), *given.get("dilations", [1])} != {1}:
        raise NotImplementedError(f"{node.name}: SAME_UPPER with strides or dilations")
    more = [size - 1 for size in given["kernel_shape"]]
    before = [size // 2 for size in more]
    after = [size - first for size, first in zip(more, before)]
    kept = [attribute for attribute in node.attribute if attribute.name not in ("auto_pad", "pads")]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute("pads", [*before, *after])])
