"""Checkpoint layouts: how a QuantizedWeight is named and packed, and what config.json says about it.

Integers, scales and zeros are those the solver chose; nothing is derived again (the original did: D20).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.spec import QuantSpec
from sparsebit.registry import Registry


class Format:
    """One layout. `suffixes` are the tensors it stores for a layer in place of `weight`."""

    TYPE: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    reorders: ClassVar[bool] = False  # its readers know a g_idx

    def encode(self, q: QuantizedWeight) -> dict[str, Tensor]:
        """Suffix -> tensor."""
        raise NotImplementedError

    def decode(self, tensors: dict[str, Tensor], spec: QuantSpec) -> QuantizedWeight:
        raise NotImplementedError

    def describe(self, specs: dict[str, QuantSpec], ignored: list[str], reordered: bool) -> dict[str, Any]:
        """`quantization_config`; reordered: groups follow g_idx."""
        raise NotImplementedError

    def specs(self, config: dict[str, Any], names: list[str]) -> dict[str, QuantSpec]:
        """The inverse: what `quantization_config` says about each layer."""
        raise NotImplementedError


FORMATS: Registry[type[Format]] = Registry("llm format")


def format_of(config: dict[str, Any]) -> Format:
    """The format that a `quantization_config` names."""
    method = str(config.get("quant_method", ""))
    if method not in FORMATS:
        raise ConfigError(
            f"quantization_config: quant_method {method!r} cannot be read; there are: {', '.join(FORMATS)}"
        )
    return FORMATS[method]()


def spec_of(bits: int, group: int | None, symmetric: bool) -> QuantSpec:
    """The spec of a weight matrix; group -1 or None: one scale per row."""
    if group is not None and group < 1:
        if group != -1:
            raise ConfigError(f"group_size: must be a positive number, or -1 for whole rows, got {group}")
        group = None
    return QuantSpec(bits=bits, symmetric=symmetric, axis=0, group=group)


FORMATS.discover(__name__)
