"""<name>_extra.onnx: a copy of the file with a `bits` attribute on every Q/DQ node, which old tools read.

The bits come from the metadata of the quantizer's own DequantizeLinear, by name. Standard runtimes refuse unknown
attributes: the copy is for those tools only.
"""

from __future__ import annotations

import os
from pathlib import Path

from sparsebit.errors import ExportError


def write_extra(path: str | Path) -> Path:
    """Write the copy beside `path`; returns its path."""
    import onnx

    path = Path(path)
    model = onnx.load(str(path), load_external_data=False)
    known = {
        node.name.removesuffix("/DQ"): int(p.value)
        for node in model.graph.node
        for p in node.metadata_props
        if p.key == "sparsebit.bits"
    }
    for node in model.graph.node:  # <quantizer>/Q and <quantizer>/DQ
        bits = known.get(node.name.rpartition("/")[0])
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and bits is not None:
            node.attribute.append(onnx.helper.make_attribute("bits", bits))
    if not known:
        raise ExportError(f"{path}: has no quantizers of Sparsebit; export it with qmodel.export_onnx()")
    extra = path.with_name(f"{path.stem}_extra{path.suffix}")
    draft = extra.with_name(f".{extra.name}.draft")
    onnx.save(model, str(draft))
    os.replace(draft, extra)
    return extra
