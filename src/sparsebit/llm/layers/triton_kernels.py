"""Packed weights on GPUs: rows times a packed weight, and the packed weight as floats, as Triton kernels.

Imported only for CUDA tensors where triton is installed (or by tests, with TRITON_INTERPRET=1). They read the words of
QuantLinear: a code of b bits starts at bit b * k of its row, and one of 3 bits may lie in two words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from sparsebit.llm.layers.linear import QuantLinear

ROWS = 64  # more rows than this are faster as one float product


@triton.jit
def _tile(
    packed,
    scales,
    zeros,
    g_idx,
    n,
    k,
    outputs,
    inputs,
    words,
    groups,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """(len(k), len(n)) weights in float32; n and k are vectors of outputs and inputs, zero outside the matrix."""
    inside = (k[:, None] < inputs) & (n[None, :] < outputs)
    bit = k * BITS
    at = packed + n[None, :].to(tl.int64) * words + (bit // 32)[:, None]
    shift = (bit % 32)[:, None].to(tl.uint32)
    code = tl.load(at, mask=inside, other=0).to(tl.uint32, bitcast=True) >> shift
    if 32 % BITS != 0:
        split = inside & (shift + BITS > 32)
        rest = tl.load(at + 1, mask=split, other=0).to(tl.uint32, bitcast=True)
        code |= tl.where(split, rest << ((32 - shift) % 32), 0)
    code &= (1 << BITS) - 1
    if ORDERED:
        group = tl.load(g_idx + k, mask=k < inputs, other=0)
    else:
        group = k // GROUP
    where = n[None, :] * groups + group[:, None]
    scale = tl.load(scales + where, mask=inside, other=0).to(tl.float32)
    zero = tl.load(zeros + where, mask=inside, other=0).to(tl.float32)
    return (code.to(tl.float32) - zero) * scale


@triton.jit
def _multiply(
    x,
    out,
    packed,
    scales,
    zeros,
    g_idx,
    rows,
    outputs,
    inputs,
    words,
    groups,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ORDERED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    m = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, inputs, K):
        k = start + tl.arange(0, K)
        mask = (m[:, None] < rows) & (k[None, :] < inputs)
        value = tl.load(x + m[:, None] * inputs + k[None, :], mask=mask, other=0)
        tile = _tile(packed, scales, zeros, g_idx, n, k, outputs, inputs, words, groups, GROUP, BITS, ORDERED)
        total += tl.dot(value, tile.to(value.dtype), input_precision="ieee")
    mask = (m[:, None] < rows) & (n[None, :] < outputs)
    tl.store(out + m[:, None] * outputs + n[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize(
    out,
    packed,
    scales,
    zeros,
    g_idx,
    outputs,
    inputs,
    words,
    groups,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ORDERED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    n = tl.program_id(0) * N + tl.arange(0, N)
    k = tl.program_id(1) * K + tl.arange(0, K)
    tile = _tile(packed, scales, zeros, g_idx, n, k, outputs, inputs, words, groups, GROUP, BITS, ORDERED)
    mask = (k[:, None] < inputs) & (n[None, :] < outputs)
    at = out + n[None, :].to(tl.int64) * inputs + k[:, None]
    tl.store(at, tile.to(out.dtype.element_ty), mask=mask)


def multiply(layer: QuantLinear, x: Tensor) -> Tensor:
    """x W^T in x's dtype, for x of shape (rows, inputs)."""
    x = x.contiguous()
    out = x.new_empty(len(x), layer.out_features)
    grid = (triton.cdiv(len(x), 16), triton.cdiv(layer.out_features, 32))
    tensors, sizes, fixed = _arguments(layer)
    _multiply[grid](x, out, *tensors, len(x), *sizes, *fixed, M=16, N=32, K=64)
    return out


def dequantize(layer: QuantLinear, dtype: torch.dtype) -> Tensor:
    """W as floats."""
    out = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device=layer.packed.device)
    grid = (triton.cdiv(layer.out_features, 32), triton.cdiv(layer.in_features, 64))
    tensors, sizes, fixed = _arguments(layer)
    _dequantize[grid](out, *tensors, *sizes, *fixed, N=32, K=64)
    return out


def _arguments(layer: QuantLinear) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[int | bool, ...]]:
    ordered = layer.g_idx is not None
    # not read then
    if layer.g_idx is not None:
        index = layer.g_idx
    else:
        index = layer.packed
    tensors = layer.packed, layer.scales, layer.zeros, index
    sizes = layer.out_features, layer.in_features, layer.packed.shape[1], layer.scales.shape[1]
    return tensors, sizes, (layer.group or layer.in_features, layer.bits, ordered)
