"""Small integers in bytes: little-endian bit streams, the layout of ONNX int4 and int2 (first value lowest)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.errors import SparsebitError


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Integers (signed ones as two's complement) of 1 to 8 bits, packed along the last axis into uint8."""
    if not 1 <= bits <= 8:
        raise SparsebitError(f"pack_bits: bits must be 1 to 8, got {bits}")
    if values.numel():
        lo = int(values.min())
        hi = int(values.max())
        if lo < -(2 ** (bits - 1)) or hi >= 2**bits or (lo < 0 and hi >= 2 ** (bits - 1)):
            raise SparsebitError(f"pack_bits: values {lo}..{hi} do not fit {bits} bits; clamp them first")
    stream = (values.to(torch.int16)[..., None] >> torch.arange(bits, device=values.device)) & 1
    stream = stream.flatten(-2)
    pad = -stream.shape[-1] % 8
    stream = torch.nn.functional.pad(stream, (0, pad)).unflatten(-1, (-1, 8))
    return (stream << torch.arange(8, device=values.device)).sum(-1).to(torch.uint8)


def unpack_bits(packed: Tensor, bits: int, length: int, signed: bool) -> Tensor:
    """The inverse of `pack_bits`; `length` values along the last axis, as int16."""
    stream = (packed.to(torch.int16)[..., None] >> torch.arange(8, device=packed.device)) & 1
    stream = stream.flatten(-2)[..., : length * bits].unflatten(-1, (length, bits))
    values = (stream << torch.arange(bits, device=packed.device)).sum(-1).to(torch.int16)
    if signed:
        return torch.where(values >= 2 ** (bits - 1), values - 2**bits, values)
    return values
