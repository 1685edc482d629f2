"""torch's exporter takes seconds, lowering and certifying a tenth of one: a graph with marks is exported once per
(model, opset, inputs) and handed out as copies. The marks are names only, so one graph serves every grid."""

from __future__ import annotations

from typing import Any

import pytest

from sparsebit.export.onnx import to_onnx as exporter
from sparsebit.quantization import export as exporting

_known: dict[Any, bytes] = {}


def export_once(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Exports of this test share graphs under `key`: use one key per model and form of the call."""
    import onnx
    import onnx_ir as ir

    to_onnx = exporter.to_onnx

    def cached(model: Any, args: Any, kwargs: Any, opset: int, **options: Any) -> Any:
        if (key, opset) not in _known:
            made = to_onnx(model, args, kwargs, opset, **options)
            _known[key, opset] = ir.serde.serialize_model(made).SerializeToString()
        return ir.serde.deserialize_model(onnx.load_model_from_string(_known[key, opset]))

    monkeypatch.setattr(exporting, "to_onnx", cached)
