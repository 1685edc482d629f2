"""Fake quantization with the arithmetic of ONNX QuantizeLinear: divide, round half to even, saturate.

    y = clamp(round(x / s), qmin - z, qmax - z) * s

For an integer zero point this is bit-equal to `(clamp(round(x / s) + z, qmin, qmax) - z) * s` and takes four
passes in place, made over pieces that stay in the cache. Gradients (straight-through for x; LSQ, Esser et al.
2020, for s; LSQ+, Bhalgat et al. 2020, for z) flow to x, s and z.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.numeric.spec import QParams, QuantSpec, broadcast, channel_axis, in_groups

CHUNK = 2**18  # values per piece: 1 MiB of float32, half of a common L2 cache


def fake_quantize(x: Tensor, qparams: QParams, spec: QuantSpec, inplace: bool = False) -> Tensor:
    """`x` rounded to the grid of `qparams`, in x's dtype; half precision is computed in float32.

    `inplace` permits to write the result into x; it is ignored where a gradient needs x.
    """
    if spec.group is not None:
        return fake_quantize(in_groups(x, spec.group), qparams, spec.ungrouped, inplace).reshape(x.shape)
    scale, zero_point = qparams.scale, qparams.zero_point
    wants_grad = torch.is_grad_enabled() and (
        x.requires_grad or scale.requires_grad or zero_point.requires_grad
    )
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        wants_grad = True  # the traceable formula; chunks and .item() are for eager mode only
    if wants_grad:
        return _FakeQuantize.apply(x, scale, zero_point, spec.qmin, spec.qmax, spec.axis)
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
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
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
    flat, flat_out = x.as_strided((n,), (1,)), out.as_strided((n,), (1,))
    for start in range(0, n, CHUNK):
        piece = flat_out[start : start + CHUNK]
        torch.div(flat[start : start + CHUNK], s, out=piece).round_().clamp_(lo, hi).mul_(s)
    return out


def _dense(x: Tensor) -> bool:
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, axis: int | None
    ) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.args = qmin, qmax, axis
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            s, z = _aligned(x, scale, zero_point, axis)
            z = z.round()
            return ((x.to(s.dtype) / s).round().clamp(qmin - z, qmax - z) * s).to(x.dtype)
        return _forward(x, scale, zero_point, qmin, qmax, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero_point = ctx.saved_tensors
        qmin, qmax, axis = ctx.args
        s, z = _aligned(x, scale, zero_point, axis)
        g, z = grads[0].to(s.dtype), z.round()
        v = x.to(s.dtype) / s
        r = v.round()
        clipped = r.clamp(qmin - z, qmax - z)
        inside = r == clipped
        gx = torch.where(inside, g, 0).to(x.dtype) if ctx.needs_input_grad[0] else None
        gs = gz = None
        if ctx.needs_input_grad[1]:
            gs = _reduce(g * torch.where(inside, r - v, clipped), scale, axis)
        if ctx.needs_input_grad[2]:
            gz = _reduce(g * torch.where(inside, 0, -s), zero_point, axis)
        return gx, gs, gz, None, None, None


def _reduce(grad: Tensor, like: Tensor, axis: int | None) -> Tensor:
    """Sum a full-size gradient down to one value per channel, in the shape and dtype of the parameter."""
    axis = channel_axis(grad.dim(), axis)
    if axis is None:
        total = grad.sum()
    else:
        total = grad.sum([d for d in range(grad.dim()) if d != axis]) if grad.dim() > 1 else grad
    return total.reshape(like.shape).to(like.dtype)
