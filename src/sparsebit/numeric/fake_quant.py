"""Fake quantization with the arithmetic of ONNX QuantizeLinear: divide, round half to even, saturate.

    y = clamp(round(x / s), qmin - z, qmax - z) * s

For an integer zero point this is bit-equal to `(clamp(round(x / s) + z, qmin, qmax) - z) * s` and takes four
passes in place, made over pieces that stay in the cache. Gradients (straight-through for x; LSQ, Esser et al.
2020, for s; LSQ+, Bhalgat et al. 2020, for z) flow to x, s and z.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch
from torch import Tensor

from sparsebit.numeric.kernels import fake_quant as kernels
from sparsebit.numeric.spec import QParams, QuantSpec, broadcast, channel_axis, in_groups

CHUNK = 2**18  # values per piece: 1 MiB of float32, half of a common L2 cache
PIECE = 2**16  # of several tensors at once


def fake_quantize(
    x: Tensor, qparams: QParams, spec: QuantSpec, inplace: bool = False, grad_scale: float = 1.0
) -> Tensor:
    """`x` rounded to the grid of `qparams`, in x's dtype; half precision is computed in float32.

    `inplace` permits to write the result into x; it is ignored where a gradient needs x. `grad_scale` multiplies
    the gradients of scale and zero point (LSQ).
    """
    if spec.group is not None:
        rows = in_groups(x, spec.group)
        return fake_quantize(rows, qparams, spec.ungrouped, inplace, grad_scale).reshape(x.shape)
    scale = qparams.scale
    zero_point = qparams.zero_point
    wants_grad = torch.is_grad_enabled() and (
        x.requires_grad or scale.requires_grad or zero_point.requires_grad
    )
    if torch.compiler.is_compiling():
        wants_grad = True  # the traceable formula; chunks and .item() are for eager mode only
    if wants_grad:
        return _FakeQuantize.apply(x, scale, zero_point, spec.qmin, spec.qmax, spec.axis, grad_scale)
    return _forward(x, scale, zero_point, spec.qmin, spec.qmax, spec.axis, inplace and not x.requires_grad)


def quantize_to_int(x: Tensor, qparams: QParams, spec: QuantSpec) -> Tensor:
    """The integer codes of `x` (int32)."""
    if spec.group is not None:
        return quantize_to_int(in_groups(x, spec.group), qparams, spec.ungrouped).reshape(x.shape)
    s, z = _aligned(x, qparams.scale, qparams.zero_point, spec.axis)
    codes = (x.to(s.dtype) / s).round_() + z.round()
    return codes.clamp_(spec.qmin, spec.qmax).to(torch.int32)


def dequantize(codes: Tensor, qparams: QParams, spec: QuantSpec) -> Tensor:
    """The values that `codes` stand for."""
    if spec.group is not None:
        return dequantize(in_groups(codes, spec.group), qparams, spec.ungrouped).reshape(codes.shape)
    s, z = _aligned(codes, qparams.scale, qparams.zero_point, spec.axis)
    return (codes.to(s.dtype) - z.round()) * s


def _aligned(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Scale and zero point shaped to broadcast against x; float64 only for float64 data."""
    if x.dtype == torch.float64:
        dtype = torch.float64
    else:
        dtype = torch.float32
    return (
        broadcast(scale.to(dtype), x.dim(), axis),
        broadcast(zero_point.to(dtype), x.dim(), axis),
    )


def _forward(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    qmin: int,
    qmax: int,
    axis: int | None,
    inplace: bool = False,
) -> Tensor:
    if x.dtype not in (torch.float32, torch.float64):
        return _forward(x.float(), scale, zero_point, qmin, qmax, axis, True).to(x.dtype)
    axis = channel_axis(x.dim(), axis)
    if axis is None and x.device.type == "cpu":
        z = round(zero_point.item())
        return _per_tensor_cpu(x, scale.item(), qmin - z, qmax - z, inplace)
    s, z_t = _aligned(x, scale, zero_point, axis)
    y = x.div_(s).round_() if inplace else x.div(s).round_()
    if qmin < 0:  # symmetric: the zero point is 0, and scalar bounds are faster
        return y.clamp_(qmin, qmax).mul_(s)
    z_t = z_t.round()
    return y.clamp_(qmin - z_t, qmax - z_t).mul_(s)


def _per_tensor_cpu(x: Tensor, s: float, lo: int, hi: int, inplace: bool) -> Tensor:
    out = x if inplace else torch.empty_like(x)
    if out.stride() != x.stride():  # an exotic layout: let torch walk it
        return x.div(s).round_().clamp_(lo, hi).mul_(s)
    n = x.numel()
    if n <= CHUNK or not _dense(x):
        return torch.div(x, s, out=out).round_().clamp_(lo, hi).mul_(s)
    flat = x.as_strided((n,), (1,))
    flat_out = out.as_strided((n,), (1,))
    for start in range(0, n, CHUNK):
        piece = flat_out[start : start + CHUNK]
        torch.div(flat[start : start + CHUNK], s, out=piece).round_().clamp_(lo, hi).mul_(s)
    return out


def _dense(x: Tensor) -> bool:
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        qmin: int,
        qmax: int,
        axis: int | None,
        grad_scale: float,
    ) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.args = qmin, qmax, axis, grad_scale
        if torch.compiler.is_compiling():
            s, z = _aligned(x, scale, zero_point, axis)
            z = z.round()
            return ((x.to(s.dtype) / s).round().clamp(qmin - z, qmax - z) * s).to(x.dtype)
        library = kernels.library_for(x)
        if library is not None:
            return kernels.forward(library, kernels.dense(x), *_bounds(scale, zero_point, qmin, qmax), axis)
        return _forward(x, scale, zero_point, qmin, qmax, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero_point = ctx.saved_tensors
        qmin, qmax, axis, grad_scale = ctx.args
        gx, gs, outside = _backward(x, grads[0], scale, zero_point, qmin, qmax, axis)
        if ctx.needs_input_grad[1]:
            gs = (gs * grad_scale).reshape(scale.shape).to(scale.dtype)
        if ctx.needs_input_grad[2]:
            outside = outside.reshape(zero_point.shape) * scale.reshape(zero_point.shape) * -grad_scale
            outside = outside.to(zero_point.dtype)
        wanted = (g if need else None for g, need in zip((gx, gs, outside), ctx.needs_input_grad))
        return *wanted, None, None, None, None


def _backward(
    x: Tensor, g: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, axis: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of x, and per channel: that of the scale, and the sum of `g` where x is outside the grid."""
    if not torch.compiler.is_compiling():
        library = None
        if g.dtype == x.dtype:
            library = kernels.library_for(x)
        if library is not None:
            return kernels.backward(
                library, kernels.dense(x), g, *_bounds(scale, zero_point, qmin, qmax), axis
            )
        if x.is_cpu and x.is_contiguous() and x.dtype == torch.float32 == g.dtype and x.numel() > PIECE:
            pieces = _pieces(x, channel_axis(x.dim(), axis))
            if pieces is not None:
                return _backward_in_pieces(x, g.contiguous(), *_bounds(scale, zero_point, qmin, qmax), pieces)
    s, z_t = _aligned(x, scale, zero_point, axis)
    g = g.to(s.dtype)
    z_t = z_t.round()
    v = x.to(s.dtype) / s
    r = v.round()
    clipped = r.clamp(qmin - z_t, qmax - z_t)
    inside = r == clipped
    gx = torch.where(inside, g, 0)
    gs = _reduce(g * torch.where(inside, clipped - v, clipped), axis)
    return gx.to(x.dtype), gs, _reduce(g - gx, axis)


def _pieces(x: Tensor, axis: int | None) -> tuple[int, int, int] | None:
    """`x` as (outer, channels, inner) if that can be cut into pieces of a good size."""
    if axis is None:
        return 1, 1, x.numel()
    outer = math.prod(x.shape[:axis])
    channels = x.shape[axis]
    inner = math.prod(x.shape[axis + 1 :])
    if channels * inner >= PIECE // 16:
        return (outer, channels, inner)
    return None


def _backward_in_pieces(
    x: Tensor, g: Tensor, s: Tensor, lo: Tensor, hi: Tensor, pieces: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward on pieces that stay in the cache: gs = sum(g c) - sum(gx v), c the clipped codes, v = x / s."""
    outer, channels, inner = pieces
    gx = torch.empty_like(x)
    flat = [t.view(pieces) for t in (x, g, gx)]
    step = max(PIECE // inner, 1)
    sums = x.new_zeros(2, channels)
    for i, c in product(range(outer), range(0, channels, step)):
        at = slice(c, c + step)
        grid: list[Any] = []
        for p in (s, lo, hi):
            grid.append(p.item() if channels == 1 else p[at, None])
        for x_, g_, gx_ in zip(*(t[i, at].split(PIECE if step == 1 else inner, dim=1) for t in flat)):
            v = (x_ / grid[0]).clamp_(grid[1] - 1, grid[2] + 1)  # one code further out; and infinity is gone
            codes = v.round()
            clipped = codes.clamp(grid[1], grid[2])
            torch.mul(g_, codes.eq_(clipped), out=gx_)
            sums[0, at] += clipped.mul_(g_).sum(1) - v.mul_(gx_).sum(1)
            sums[1, at] += g_.sum(1) - gx_.sum(1)
    return gx, sums[0], sums[1]


def _bounds(scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, and the lowest and the highest code minus the zero point, as the kernels take them."""
    s = scale.detach().to(torch.float32).contiguous()
    z = zero_point.detach().to(torch.float32).round().expand_as(s)
    return s, qmin - z, qmax - z


def _reduce(grad: Tensor, axis: int | None) -> Tensor:
    """Sum a full-size gradient down to one value per channel."""
    axis = channel_axis(grad.dim(), axis)
    if axis is None:
        return grad.sum()
    if grad.dim() > 1:
        return grad.sum([d for d in range(grad.dim()) if d != axis])
    return grad
