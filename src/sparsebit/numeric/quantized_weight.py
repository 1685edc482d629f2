"""QuantizedWeight: what a solver chose for a matrix (outputs, inputs), and nothing derived from it again.

w = (code - zero) * scale, with unsigned codes in every scheme: the symmetric grid of b bits has zero = 2^(b-1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.numeric.spec import QuantSpec

WIDTHS = (2, 3, 4, 8)


@dataclass(frozen=True)
class QuantizedWeight:
    codes: Tensor  # (outputs, inputs) uint8, from 0 to 2^bits - 1
    scales: Tensor  # (outputs, groups)
    zeros: Tensor  # (outputs, groups) uint8: the code of 0.0
    bits: int
    symmetric: bool = True
    group: int | None = None  # inputs of one scale; None: a row has one
    g_idx: Tensor | None = None  # (inputs,) the group of each input, where it is not input // group

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def groups(self) -> Tensor:
        """The group of each input."""
        if self.g_idx is not None:
            return self.g_idx.long()
        return group_index(self.shape[1], self.group, self.codes.device)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The float matrix; computed in float32, then cast."""
        scales = self.scales.float()
        zeros = self.zeros.float()
        inputs = self.shape[1]
        if self.g_idx is None and inputs % (self.group or inputs) == 0:  # without copies of the grid
            levels = self.codes.float().unflatten(1, (scales.shape[1], -1))
            return levels.sub_(zeros[..., None]).mul_(scales[..., None]).flatten(1).to(dtype)
        index = self.groups
        return (self.codes.float() - zeros[:, index]).mul_(scales[:, index]).to(dtype)

    def stored_bits(self) -> float:
        """Bits per weight in a file: codes, scales and, where they say something, zeros and the group index."""
        total = self.codes.numel() * self.bits + self.scales.numel() * self.scales.element_size() * 8
        total += 0 if self.symmetric else self.zeros.numel() * self.bits
        total += 0 if self.g_idx is None else self.g_idx.numel() * 32
        return total / self.codes.numel()


def group_index(inputs: int, group: int | None, device: torch.device | None = None) -> Tensor:
    """(inputs,): groups are runs of `group` inputs, the last one may be shorter."""
    return torch.arange(inputs, device=device) // (group or max(inputs, 1))


def check(weight: Tensor, spec: QuantSpec) -> None:
    """A matrix, a width that can be packed, and numbers that are numbers."""
    if weight.dim() != 2 or weight.numel() == 0:
        raise ConfigError(
            f"weight: must be a matrix (outputs, inputs) with values, its shape is {tuple(weight.shape)}"
        )
    if spec.bits not in WIDTHS:
        raise ConfigError(f"bits: must be one of {', '.join(map(str, WIDTHS))}, got {spec.bits}")
    if not bool(torch.isfinite(weight).all()):
        raise ConfigError("weight: has NaN or Inf; repair the checkpoint before it is quantized")


def round_to(values: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Codes of the nearest grid values, saturated; float tensors of one shape."""
    return (values / scales).round_().add_(zeros).clamp_(0, 2**bits - 1)
