"""QuantLinear: a Linear layer on packed codes. On CPUs torch's int4 kernel where it fits, else the weight is
dequantized for the matrix product and dropped again.

Time of one token against the float layer, 4096 x 4096, one thread: bfloat16 0.3; float32 7 (torch has no fast kernel
for it); dequantized 70 and more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.words import pack_words, unpack_words

KERNEL_GROUPS = (32, 64, 128, 256)


class QuantLinear(nn.Module):
    """y = x W^T + b with W = (codes - zeros) * scales; `weight` is the float matrix, made when it is asked for."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor
    g_idx: Tensor | None
    bias: Tensor | None

    def __init__(
        self, q: QuantizedWeight, bias: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = q.shape
        self.bits, self.symmetric, self.group, self.dtype = q.bits, q.symmetric, q.group, dtype
        self.register_buffer("packed", pack_words(q.codes, q.bits))
        self.register_buffer("scales", q.scales)
        self.register_buffer("zeros", q.zeros)
        self.register_buffer("g_idx", q.g_idx)
        self.register_buffer("bias", None if bias is None else bias.detach().to(dtype))
        self._kernel: tuple[Tensor, Tensor] | None = None

    def quantized(self) -> QuantizedWeight:
        codes = unpack_words(self.packed, self.bits, self.in_features)
        return QuantizedWeight(
            codes, self.scales, self.zeros, self.bits, self.symmetric, self.group, self.g_idx
        )

    @property
    def weight(self) -> Tensor:
        return self.quantized().dequantize(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self._fits(x):
            out = self._int4(x.reshape(-1, self.in_features)).reshape(*x.shape[:-1], self.out_features)
            return out if self.bias is None else out + self.bias
        return F.linear(x, self.weight.to(x.dtype), self.bias)

    def _fits(self, x: Tensor) -> bool:
        """torch's CPU kernel: 4 bits, full groups of its sizes; few rows (more are faster as one float product)."""
        return (
            self.bits == 4
            and self.group in KERNEL_GROUPS
            and self.g_idx is None
            and self.in_features % self.group == 0
            and self.out_features % 16 == 0
            and x.device.type == "cpu"
            and x.numel() <= 8 * self.in_features
            and not (torch.is_grad_enabled() and x.requires_grad)
        )

    def _int4(self, x: Tensor) -> Tensor:
        if (
            self._kernel is None or self._kernel[1].dtype != x.dtype
        ):  # (code - 8) * scale + offset, with offset = (8 - zero) * scale
            codes = unpack_words(self.packed, 4, self.in_features).int()
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            scales = self.scales.float().T
            offset = (8 - self.zeros.float().T) * scales
            self._kernel = packed, torch.stack([scales, offset], 2).to(x.dtype).contiguous()
        packed, grid = self._kernel
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, self.group, grid)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._kernel = None  # made from other codes

    def extra_repr(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group={self.group or 'row'}, {kind}, bias={self.bias is not None}"
        )
