"""virtual: plain QDQ with the types of the grid, for any runtime that follows the ONNX standard."""

from __future__ import annotations

from typing import Any

from sparsebit.export.backends.base import BACKENDS, Backend
from sparsebit.export.onnx.marks import Marks


@BACKENDS.register()
class VirtualBackend(Backend):
    TYPE = "virtual"

    def lower(self, model: Any, marks: Marks) -> Any:
        from sparsebit.export.onnx.qdq import lower_marks
        from sparsebit.export.onnx.rewrites import keep_apart

        lowered = lower_marks(model, marks)
        keep_apart(model)
        return lowered
