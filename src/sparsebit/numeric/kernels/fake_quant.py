"""Calls of the native kernels on torch tensors: dense float32 on the CPU, channels anywhere or none."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from sparsebit.numeric.kernels import native
from sparsebit.numeric.spec import channel_axis

PIECE = 2**14  # values whose sums are kept together: 64 KiB
ALONE = 2**15  # fewer values than this are not worth a second thread

Shape = tuple[int, int, int]  # outer, channels, inner


def library_for(x: Tensor) -> ctypes.CDLL | None:
    """The native kernels, where they take `x`."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and x.numel():
        return native()
    return None


def dense(x: Tensor) -> Tensor:
    return x if _channels_last(x) else x.contiguous()


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


def _shape(x: Tensor, axis: int | None) -> Shape:
    axis = channel_axis(x.dim(), axis)
    if axis is None:
        return 1, 1, x.numel()
    sizes = list(x.shape)
    if _channels_last(x) and not x.is_contiguous():
        sizes = [sizes[0], sizes[2], sizes[3], sizes[1]]
        axis = [0, 3, 1, 2][axis]
    return math.prod(sizes[:axis]), sizes[axis], math.prod(sizes[axis + 1 :])


def _threads(x: Tensor) -> int:
    return 1 if x.numel() < ALONE else torch.get_num_threads()


def forward(lib: ctypes.CDLL, x: Tensor, s: Tensor, lo: Tensor, hi: Tensor, axis: int | None) -> Tensor:
    """`x` is dense; s, lo and hi are contiguous float32, one per channel."""
    y = torch.empty_like(x)
    outer, channels, inner = _shape(x, axis)
    grid = s.data_ptr(), lo.data_ptr(), hi.data_ptr(), _threads(x)
    if inner == 1 and channels > 1:
        pieces = max(min(outer, x.numel() // PIECE), 1)
        lib.forward_last(x.data_ptr(), y.data_ptr(), outer, channels, pieces, *grid)
    else:
        pieces = -(-inner // PIECE)
        lib.forward(x.data_ptr(), y.data_ptr(), outer, channels, inner, pieces, *grid)
    return y


def backward(
    lib: ctypes.CDLL, x: Tensor, g: Tensor, s: Tensor, lo: Tensor, hi: Tensor, axis: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of x, and per channel the sums that make those of scale and zero point (float64)."""
    if _channels_last(x):
        g = g.contiguous(memory_format=torch.channels_last)
    else:
        g = g.contiguous()
    gx = torch.empty_like(x)
    outer, channels, inner = _shape(x, axis)
    grid = s.data_ptr(), lo.data_ptr(), hi.data_ptr()
    if inner == 1 and channels > 1:
        pieces = max(min(outer, x.numel() // PIECE), 1)
        sums = torch.empty(pieces, 2, channels, dtype=torch.float64)
        lib.backward_last(
            x.data_ptr(),
            g.data_ptr(),
            gx.data_ptr(),
            outer,
            channels,
            pieces,
            *grid,
            sums.data_ptr(),
            _threads(x),
        )
        total = sums.sum(0)
    else:
        pieces = -(-inner // PIECE)
        sums = torch.empty(outer, channels, pieces, 2, dtype=torch.float64)
        lib.backward(
            x.data_ptr(),
            g.data_ptr(),
            gx.data_ptr(),
            outer,
            channels,
            inner,
            pieces,
            *grid,
            sums.data_ptr(),
            _threads(x),
        )
        total = sums.sum((0, 2)).T
    return gx, total[0], total[1]
