"""Integers of 2 to 8 bits in 32-bit words: one little-endian bit stream per row, the layout of GPTQ checkpoints, of
compressed-tensors and of the original's kernels; a 3-bit value may lie in two words.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.errors import SparsebitError


def words_of(length: int, bits: int) -> int:
    """32-bit words that `length` values need."""
    return -(-length * bits // 32)


def pack_words(values: Tensor, bits: int, axis: int = -1) -> Tensor:
    """Unsigned integers, packed along `axis` into int32; a value that does not fit is an error, never a neighbour."""
    if values.numel() and (int(values.min()) < 0 or int(values.max()) >= 2**bits):
        raise SparsebitError(
            f"pack_words: values {int(values.min())}..{int(values.max())} do not fit {bits} bits; clamp them first"
        )
    rows = values.movedim(axis, -1)
    length = rows.shape[-1]
    period = math.lcm(bits, 32) // bits  # values until a word starts again
    rows = F.pad(rows.int(), (0, -length % period)).unflatten(-1, (-1, period))
    words = torch.zeros(*rows.shape[:-1], period * bits // 32, dtype=torch.int64, device=values.device)
    for i in range(period):
        word, shift = divmod(i * bits, 32)
        value = rows[..., i].long()
        words[..., word] |= (value << shift) & 0xFFFFFFFF
        if shift + bits > 32:
            words[..., word + 1] |= value >> (32 - shift)
    words = words.flatten(-2)[..., : words_of(length, bits)]
    return torch.where(words >= 2**31, words - 2**32, words).int().movedim(-1, axis).contiguous()


def unpack_words(words: Tensor, bits: int, length: int, axis: int = -1) -> Tensor:
    """The inverse: `length` values along `axis`, as uint8."""
    rows = words.movedim(axis, -1)
    if rows.shape[-1] < words_of(length, bits):
        raise SparsebitError(
            f"unpack_words: {length} values of {bits} bits need {words_of(length, bits)} words, "
            f"there are {rows.shape[-1]}; the file has another width or layout"
        )
    if 8 % bits == 0:  # whole values in every byte
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
        values = (rows.reshape(-1).view(torch.uint8).view(*rows.shape[:-1], -1)[..., None] >> shifts) & (
            2**bits - 1
        )
        return values.flatten(-2)[..., :length].movedim(-1, axis).contiguous()
    period = math.lcm(bits, 32) // bits
    per = math.lcm(bits, 32) // 32
    rows = F.pad(rows, (0, -rows.shape[-1] % per)).unflatten(-1, (-1, per))
    values = torch.empty(*rows.shape[:-1], period, dtype=torch.uint8, device=words.device)
    for i in range(period):
        word, shift = divmod(i * bits, 32)
        value = rows[..., word] >> shift  # brings the sign along: masked below
        if shift + bits > 32:
            value = (value & (2 ** (32 - shift) - 1)) | (rows[..., word + 1] << (32 - shift))
        values[..., i] = (value & (2**bits - 1)).to(torch.uint8)
    return values.flatten(-2)[..., :length].movedim(-1, axis).contiguous()
