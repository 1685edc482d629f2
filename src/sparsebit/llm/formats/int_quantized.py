"""compressed-tensors, `int-quantized`: int8 weights, one code per byte, and activations rounded per token at run time
(W8A8)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError, ExportError
from sparsebit.llm.formats import FORMATS, Format, spec_of
from sparsebit.llm.layers.int8 import Int8Linear
from sparsebit.llm.layers.linear import QuantLinear
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.spec import QuantSpec

METHOD = "compressed-tensors"


@FORMATS.register()
class IntQuantized(Format):
    TYPE = "int-quantized"
    suffixes = ("weight_scale", "weight")

    def __init__(self) -> None:
        self.activations = True  # in 8 bits; a file that is read may say otherwise

    def shapes(self, spec: QuantSpec, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], str]]:
        if spec.bits != 8 or not spec.symmetric or spec.group is not None:
            raise ConfigError(
                "int-quantized: holds whole rows of 8 bits without zero points; say bits=8 (--bits 8) and "
                "group_size=-1 (--group-size -1), or leave both out"
            )
        return {"weight_scale": ((outputs, 1), "scale"), "weight": ((outputs, inputs), "int8")}

    def encode(self, q: Any) -> dict[str, Tensor]:
        if not isinstance(q, QuantizedWeight) or q.bits != 8 or not q.symmetric or q.group is not None:
            raise ExportError("int-quantized: holds symmetric int8 rows; use bits=8 and group_size=-1")
        return {"weight_scale": q.scales, "weight": (q.codes.int() - 128).to(torch.int8)}

    def decode(self, tensors: dict[str, Tensor], spec: QuantSpec) -> QuantizedWeight:
        scales = tensors["weight_scale"].reshape(len(tensors["weight"]), -1)
        codes = (tensors["weight"].int() + 128).to(torch.uint8)
        return QuantizedWeight(codes, scales, torch.full_like(scales, 128, dtype=torch.uint8), 8)

    def layer(self, q: Any, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        return (Int8Linear if self.activations else QuantLinear)(q, bias, dtype)

    def describe(self, specs: dict[str, QuantSpec], ignored: list[str], reordered: bool) -> dict[str, Any]:
        common = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None}
        group = {
            "targets": ["Linear"],
            "weights": {**common, "strategy": "channel", "dynamic": False},
            "input_activations": {**common, "strategy": "token", "dynamic": True},
            "format": self.TYPE,
        }
        return {
            "quant_method": METHOD,
            "format": self.TYPE,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
        }

    def specs(self, config: dict[str, Any], names: list[str]) -> dict[str, QuantSpec]:
        groups = list(config["config_groups"].values())
        weights = groups[0]["weights"]
        inputs = groups[0].get("input_activations")
        known = weights["num_bits"] == 8 and weights["symmetric"] and weights["strategy"] == "channel"
        if inputs is not None:
            known = (
                known
                and inputs["num_bits"] == 8
                and bool(inputs["dynamic"])
                and inputs["strategy"] == "token"
            )
        if len(groups) != 1 or not known:
            raise ConfigError(
                "quantization_config: of int-quantized, only int8 rows with no or dynamic int8 activations per token "
                "can be read"
            )
        self.activations = inputs is not None
        return {name: spec_of(8, None, True) for name in names}
