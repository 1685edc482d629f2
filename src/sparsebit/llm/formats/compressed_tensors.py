"""compressed-tensors, `pack-quantized`: what vLLM and transformers (with that package) load.

weight_packed int32 (outputs, words), weight_scale (outputs, groups), weight_shape, and for asymmetric grids
weight_zero_point, packed along the outputs. A weight_g_idx is read, but not written: readers dropped it. Codes are
stored with 2^(bits-1) added, so they are our unsigned codes.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import ConfigError, ExportError
from sparsebit.llm.formats import FORMATS, Format, groups_of, spec_of
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.spec import QuantSpec
from sparsebit.numeric.words import pack_words, unpack_words, words_of

EXPERT = re.compile(r"\.experts\.\d+\.")


@FORMATS.register()
class CompressedTensors(Format):
    TYPE = "compressed-tensors"
    suffixes = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")

    def shapes(self, spec: QuantSpec, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], str]]:
        groups = groups_of(spec, inputs)
        found: dict[str, tuple[tuple[int, ...], str]] = {
            "weight_packed": ((outputs, words_of(inputs, spec.bits)), "int32"),
            "weight_scale": ((outputs, groups), "scale"),
            "weight_shape": ((2,), "int64"),
        }
        if not spec.symmetric:
            found["weight_zero_point"] = ((words_of(outputs, spec.bits), groups), "int32")
        return found

    def encode(self, q: QuantizedWeight) -> dict[str, Tensor]:
        tensors = {
            "weight_packed": pack_words(q.codes, q.bits),
            "weight_scale": q.scales.contiguous(),
            "weight_shape": torch.tensor(q.shape),
        }
        if not q.symmetric:
            tensors["weight_zero_point"] = pack_words(q.zeros, q.bits, axis=0)
        if q.g_idx is not None:
            raise ExportError(
                "compressed-tensors: readers know no g_idx any more; use static_groups or format='gptq'"
            )
        return tensors

    def decode(self, tensors: dict[str, Tensor], spec: QuantSpec) -> QuantizedWeight:
        outputs, inputs = tensors["weight_shape"].tolist()
        scales = tensors["weight_scale"]
        codes = _unpack(tensors["weight_packed"], spec.bits, inputs)
        if spec.symmetric:
            zeros = torch.full_like(scales, 2 ** (spec.bits - 1), dtype=torch.uint8)
        else:
            zeros = unpack_words(tensors["weight_zero_point"], spec.bits, outputs, axis=0)
        return QuantizedWeight(
            codes, scales, zeros, spec.bits, spec.symmetric, spec.group, tensors.get("weight_g_idx")
        )

    def describe(self, specs: dict[str, QuantSpec], ignored: list[str], reordered: bool) -> dict[str, Any]:
        kinds = list(dict.fromkeys(specs.values()))
        kinds.sort(key=lambda spec: not any(EXPERT.search(n) for n, s in specs.items() if s == spec))
        groups = {}
        for i, spec in enumerate(kinds):
            groups[f"group_{i}"] = {
                "targets": ["Linear"] if len(kinds) == 1 else _targets(specs, spec),
                "weights": {
                    "num_bits": spec.bits,
                    "type": "int",
                    "symmetric": spec.symmetric,
                    "strategy": "group" if spec.group else "channel",
                    "group_size": spec.group,
                    "dynamic": False,
                    "actorder": None,
                },
                "format": "pack-quantized",
            }
        config: dict[str, Any] = {
            "quant_method": self.TYPE,
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ignored,
        }
        if len(kinds) == 1 and not kinds[0].symmetric:
            # The package's own layers expect zero points that are not packed (0.15 to 0.20). With this word
            # transformers unpacks the weights when it loads them, by the first group's scheme: right for one group.
            config["dequantize"] = True
        return config

    def specs(self, config: dict[str, Any], names: list[str]) -> dict[str, QuantSpec]:
        if config.get("format") not in ("pack-quantized", "mixed-precision"):
            raise ConfigError(
                f"quantization_config: format {config.get('format')!r} cannot be read, only pack-quantized"
            )
        found = {}
        for name in names:
            for group in config["config_groups"].values():
                if name not in found and any(_names(target, name) for target in group["targets"]):
                    w = group["weights"]
                    size = None
                    if w.get("strategy") == "group":
                        size = w.get("group_size")
                    found[name] = spec_of(w["num_bits"], size, bool(w["symmetric"]))
            if name not in found:
                raise ConfigError(
                    f"quantization_config: no config group names {name}, which is packed; complete its targets"
                )
        return found


def _targets(specs: dict[str, QuantSpec], spec: QuantSpec) -> list[str]:
    """Names of layers; experts by a pattern, because transformers, which stacks them, looks for one."""
    names = [name for name, other in specs.items() if other == spec]
    experts = [name for name in names if EXPERT.search(name)]
    return [f"re:.*{EXPERT.pattern}.*"] * bool(experts) + [name for name in names if name not in set(experts)]


def _names(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target in ("Linear", name) or name.endswith("." + target)


def _unpack(words: Tensor, bits: int, inputs: int) -> Tensor:
    """Before 0.13 or so a word held 32 // bits whole values; now the stream is dense. 3 bits is where they differ."""
    per = 32 // bits
    loose = -(-inputs // per)
    if words.shape[-1] == words_of(inputs, bits) or words.shape[-1] != loose:
        return unpack_words(words, bits, inputs)
    shifts = torch.arange(per, device=words.device, dtype=torch.int32) * bits
    values = (words[..., None] >> shifts) & (2**bits - 1)
    return values.flatten(-2)[..., :inputs].to(torch.uint8).contiguous()
