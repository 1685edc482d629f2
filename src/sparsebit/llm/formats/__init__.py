"""Checkpoint layouts: the names and the packing of a QuantizedWeight, and its entry in config.json.

Integers, scales and zeros are those of the solver. They are never derived again, as the original did (D20).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.llm.layers.linear import QuantLinear
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.solvers.wanda import PrunedWeight
from sparsebit.numeric.spec import QuantSpec
from sparsebit.registry import Registry


class Format:
    """One layout. `suffixes` are the tensors it stores for a layer in place of `weight`."""

    TYPE: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    reorders: ClassVar[bool] = False  # its readers know a g_idx
    plain: ClassVar[bool] = False  # float weights, named and shaped as in the model
    one_group_size: ClassVar[bool] = False  # config.json has a single size for all layers
    activations: bool = False  # layers round their inputs to 8 bits, token by token

    def shapes(self, spec: QuantSpec, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """The tensors that `encode` will write for a layer: suffix -> shape and dtype.

        The dtype "scale" is that of scales, "model" that of float weights.
        """
        raise NotImplementedError

    def encode(self, q: Any) -> dict[str, Tensor]:
        """Suffix -> tensor; of a QuantizedWeight, or of what else the format is for."""
        raise NotImplementedError

    def decode(self, tensors: dict[str, Tensor], spec: QuantSpec) -> QuantizedWeight | PrunedWeight:
        raise NotImplementedError

    def layer(self, q: Any, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """The module that runs a layer of this format."""
        return QuantLinear(q, bias, dtype)

    def describe(self, specs: dict[str, QuantSpec], ignored: list[str], reordered: bool) -> dict[str, Any]:
        """`quantization_config`; reordered: groups follow g_idx."""
        raise NotImplementedError

    def specs(self, config: dict[str, Any], names: list[str]) -> dict[str, QuantSpec]:
        """The inverse: the settings of each layer, from `quantization_config`."""
        raise NotImplementedError


FORMATS: Registry[type[Format]] = Registry("llm format")


def groups_of(spec: QuantSpec, inputs: int) -> int:
    """The number of groups of one row; the last group may be short."""
    return -(-inputs // (spec.group or max(inputs, 1)))


def format_of(config: dict[str, Any]) -> Format:
    """The format that a `quantization_config` names."""
    method = str(config.get("quant_method", ""))
    if method == "compressed-tensors" and config.get("format") in FORMATS:
        method = str(config["format"])  # one name for several layouts
    if any(_in_blocks(group) for group in (config.get("config_groups") or {}).values()):
        method = "turned"
    if method not in FORMATS:
        raise ConfigError(
            f"quantization_config: quant_method {method!r} cannot be read; there are: {', '.join(FORMATS)}"
        )
    return FORMATS[method]()


def _in_blocks(group: dict[str, Any]) -> bool:
    return (group.get("weights") or {}).get("strategy") == "block"


def spec_of(bits: int, group: int | None, symmetric: bool) -> QuantSpec:
    """The spec of a weight matrix; group -1 or None: one scale per row."""
    if group is not None and group < 1:
        if group != -1:
            raise ConfigError(f"group_size: must be a positive number, or -1 for whole rows, got {group}")
        group = None
    return QuantSpec(bits=bits, symmetric=symmetric, axis=0, group=group)


FORMATS.discover(__name__)
