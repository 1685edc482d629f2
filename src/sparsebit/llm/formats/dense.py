"""dense: plain float weights, as every reader of safetensors expects them. Pruning methods are saved in it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsebit.errors import ExportError
from sparsebit.llm.formats import FORMATS, Format
from sparsebit.numeric.solvers.wanda import PrunedWeight
from sparsebit.numeric.spec import QuantSpec


@FORMATS.register()
class Dense(Format):
    TYPE = "dense"
    suffixes = ("weight",)
    plain = True

    def shapes(self, spec: QuantSpec, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"weight": ((outputs, inputs), "model")}

    def encode(self, q: Any) -> dict[str, Tensor]:
        if not isinstance(q, PrunedWeight):
            raise ExportError("dense: holds pruned float weights, not codes; choose another format")
        return {"weight": q.weight}

    def decode(self, tensors: dict[str, Tensor], spec: QuantSpec) -> PrunedWeight:
        return PrunedWeight(tensors["weight"])

    def describe(self, specs: dict[str, QuantSpec], ignored: list[str], reordered: bool) -> dict[str, Any]:
        return {}  # no layer is quantized, so config.json has no entry

    def specs(self, config: dict[str, Any], names: list[str]) -> dict[str, QuantSpec]:
        return {}
