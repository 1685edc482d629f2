"""compressed-tensors, `pack-quantized` with blocks: layers that keep their matrix as (inputs, outputs), GPT-2's Conv1D.

A group of inputs is then a block of rows and one column. transformers reads it when it unpacks while loading
(`dequantize`), because the package's own packed layers are all Linear. Zero points are not packed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import ConfigError, ExportError
from sparsebit.llm.formats import FORMATS, Format, groups_of, spec_of
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.spec import QuantSpec
from sparsebit.numeric.words import pack_words, unpack_words, words_of

METHOD = "compressed-tensors"


@FORMATS.register()
class Turned(Format):
    TYPE = "turned"
    suffixes = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    one_group_size = True

    def shapes(self, spec: QuantSpec, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], str]]:
        groups = groups_of(spec, inputs)
        found: dict[str, tuple[tuple[int, ...], str]] = {
            "weight_packed": ((inputs, words_of(outputs, spec.bits)), "int32"),
            "weight_scale": ((groups, outputs), "scale"),
            "weight_shape": ((2,), "int64"),
        }
        if spec.symmetric:
            return found
        return {**found, "weight_zero_point": ((groups, outputs), "int8")}

    def encode(self, q: QuantizedWeight) -> dict[str, Tensor]:
        if q.g_idx is not None:
            raise ExportError(
                "turned: has no groups in another order; use static_groups=True or format='gptq'"
            )
        tensors = {
            "weight_packed": pack_words(q.codes.T.contiguous(), q.bits),
            "weight_scale": q.scales.T.contiguous(),
            "weight_shape": torch.tensor(q.shape[::-1]),
        }
        if not q.symmetric:
            tensors["weight_zero_point"] = (q.zeros.T.int() - 2 ** (q.bits - 1)).to(torch.int8).contiguous()
        return tensors

    def decode(self, tensors: dict[str, Tensor], spec: QuantSpec) -> QuantizedWeight:
        outputs = int(tensors["weight_shape"][1])
        codes = unpack_words(tensors["weight_packed"], spec.bits, outputs).T.contiguous()
        scales = tensors["weight_scale"].T.contiguous()
        half = 2 ** (spec.bits - 1)
        zeros = torch.full_like(scales, half, dtype=torch.uint8)
        if not spec.symmetric:
            zeros = (tensors["weight_zero_point"].int() + half).to(torch.uint8).T.contiguous()
        return QuantizedWeight(codes, scales, zeros, spec.bits, spec.symmetric, spec.group)

    def describe(self, specs: dict[str, QuantSpec], ignored: list[str], reordered: bool) -> dict[str, Any]:
        kinds = list(dict.fromkeys(specs.values()))
        if len(kinds) > 1:
            raise ConfigError(
                "bits: readers unpack Conv1D layers by one scheme; use one width, or format='gptq' for GPTQModel"
            )
        if not kinds[0].group:
            raise ConfigError(
                "group_size: Conv1D layers are stored in blocks, so whole rows (-1) cannot be read; use 128, 64 or 32, "
                "or format='gptq' for GPTQModel"
            )
        weights = {
            "num_bits": kinds[0].bits,
            "type": "int",
            "symmetric": kinds[0].symmetric,
            "strategy": "block",
            "block_structure": [kinds[0].group, 1],
            "dynamic": False,
        }
        return {
            "quant_method": METHOD,
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {"targets": ["Conv1D"], "weights": weights, "format": "pack-quantized"}
            },
            "ignore": ignored,
            "dequantize": True,
        }

    def specs(self, config: dict[str, Any], names: list[str]) -> dict[str, QuantSpec]:
        weights = next(iter(config["config_groups"].values()))["weights"]
        rows, columns = weights["block_structure"]
        if columns != 1:
            raise ConfigError(
                f"quantization_config: blocks of {rows} x {columns} cannot be read, only one column"
            )
        return dict.fromkeys(names, spec_of(weights["num_bits"], rows, bool(weights["symmetric"])))
