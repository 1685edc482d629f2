"""openvino: QDQ of at most 8 bits; its own passes make FakeQuantize of every pair and choose the kernels."""

from __future__ import annotations

from typing import Any

from sparsebit.export.backends.base import BACKENDS, WEIGHTED, Backend, Problem
from sparsebit.export.onnx.marks import Mark, Marks


@BACKENDS.register()
class OpenvinoBackend(Backend):
    TYPE = "openvino"
    BITS = {"W": range(2, 9), "A": range(2, 9)}
    INTEGER_OPS = (  # from its documentation: low precision transformations
        *(*WEIGHTED, "ConvTranspose[123]d", "MatMul", "AddMM", "Add", "Mul", "Concat"),
        *("*AvgPool*", "MaxPool*", "PReLU", "Upsample", "Interpolate", "Mean"),
    )

    def problems(self, mark: Mark) -> list[Problem]:
        if mark.spec.bits > 8:
            letter = "W" if mark.is_weight else "A"
            return [Problem(mark.name, "OpenVINO has no integers above 8 bits", f"{letter}.QUANTIZER.BIT: 8")]
        return []

    def lower(self, model: Any, marks: Marks) -> Any:
        from sparsebit.export.onnx import rewrites
        from sparsebit.export.onnx.clips import absorb_clips
        from sparsebit.export.onnx.qdq import lower_marks

        absorb_clips(model, marks, in_codes=False)
        aliases = rewrites.merge_equal(model, marks)
        lowered = lower_marks(model, {name: mark for name, mark in marks.items() if name not in aliases})
        rewrites.keep_apart(model)
        lowered.add_aliases(aliases)
        return lowered
