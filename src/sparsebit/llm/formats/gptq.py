"""The GPTQ layout of AutoGPTQ and GPTQModel: qweight (words of inputs, outputs), qzeros (groups, words of outputs),
scales (groups, outputs), g_idx (inputs). Version 1 stores zero - 1; readers disagree about a zero of 0 there, so
asymmetric grids, which have such zeros, are written as version 2, which stores the zero itself.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsebit.errors import ExportError
from sparsebit.llm.formats import FORMATS, Format, groups_of, spec_of
from sparsebit.numeric.quantized_weight import QuantizedWeight, group_index
from sparsebit.numeric.spec import QuantSpec
from sparsebit.numeric.words import pack_words, unpack_words, words_of


@FORMATS.register()
class Gptq(Format):
    TYPE = "gptq"
    suffixes: ClassVar = ("qweight", "qzeros", "scales", "g_idx")
    reorders = True
    one_group_size = True

    def __init__(self) -> None:
        self.version: int | None = None  # of a file that is read; ours follow from the grid

    def shapes(self, spec: QuantSpec, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], str]]:
        groups = groups_of(spec, inputs)
        return {
            "qweight": ((words_of(inputs, spec.bits), outputs), "int32"),
            "qzeros": ((groups, words_of(outputs, spec.bits)), "int32"),
            "scales": ((groups, outputs), "scale"),
            "g_idx": ((inputs,), "int32"),
        }

    def encode(self, q: QuantizedWeight) -> dict[str, Tensor]:
        return encode(q, version=1 if q.symmetric else 2)

    def decode(self, tensors: dict[str, Tensor], spec: QuantSpec) -> QuantizedWeight:
        return decode(tensors, spec, self.version or (1 if spec.symmetric else 2))

    def describe(self, specs: dict[str, QuantSpec], ignored: list[str], reordered: bool) -> dict[str, Any]:
        kinds = list(specs.values())
        usual = max(set(kinds), key=kinds.count)
        config: dict[str, Any] = {
            "quant_method": self.TYPE,
            "bits": usual.bits,
            "group_size": usual.group or -1,
            "sym": usual.symmetric,
            "desc_act": reordered,
            "checkpoint_format": "gptq" if usual.symmetric else "gptq_v2",
            "lm_head": False,
        }
        other = {f"+:^{re.escape(n)}$": {"bits": s.bits} for n, s in specs.items() if s != usual}
        return {**config, "dynamic": other} if other else config

    def specs(self, config: dict[str, Any], names: list[str]) -> dict[str, QuantSpec]:
        if config.get("checkpoint_format") == "gptq_v2":
            self.version = 2
        else:
            self.version = 1
        found = {}
        for name in names:
            local = dict(config)
            for pattern, changes in (config.get("dynamic") or {}).items():
                if re.match(pattern.removeprefix("+:"), name):
                    local.update(changes)
            found[name] = spec_of(local["bits"], local["group_size"], bool(local.get("sym", True)))
        return found


def encode(q: QuantizedWeight, version: int) -> dict[str, Tensor]:
    zeros = q.zeros.T.int()
    if version == 1:
        if int(zeros.min()) == 0:
            raise ExportError(
                "gptq: version 1 cannot hold a zero point of 0; use version 2 or the compressed-tensors format"
            )
        zeros = zeros - 1
    if q.g_idx is not None:
        index = q.g_idx
    else:
        index = group_index(q.shape[1], q.group)
    return {
        "qweight": pack_words(q.codes.T, q.bits, axis=0),
        "qzeros": pack_words(zeros, q.bits),
        "scales": q.scales.T.contiguous(),
        "g_idx": index.int().contiguous(),
    }


def decode(tensors: dict[str, Tensor], spec: QuantSpec, version: int) -> QuantizedWeight:
    scales = tensors["scales"].T.contiguous()
    index = tensors["g_idx"].int()
    inputs = len(index)
    outputs = scales.shape[0]
    codes = unpack_words(tensors["qweight"], spec.bits, inputs, axis=0).T.contiguous()
    zeros = unpack_words(tensors["qzeros"], spec.bits, outputs).T.int()
    zeros = zeros + 1 if version == 1 else zeros
    plain = torch.equal(index, group_index(inputs, spec.group, index.device).int())
    return QuantizedWeight(
        codes,
        scales,
        zeros.to(torch.uint8).contiguous(),
        spec.bits,
        spec.symmetric,
        spec.group,
        None if plain else index,
    )
