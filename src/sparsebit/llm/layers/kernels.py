"""Calls of the native kernels (quant_linear.c): few rows times a packed weight, and the packed weight as floats.

They read the packed words in their stored form, so a layer has one copy of its weight. The library is built when a
packed layer runs for the first time; SPARSEBIT_NATIVE=0 or `numeric.kernels.use_native(False)` switch it off.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.numeric import kernels as switch
from sparsebit.numeric.kernels.build import load_library

LANES = 16  # inputs that the kernels take at once
ROWS = 8  # more rows than this are faster as one float product
ALONE = 2**18  # fewer weights than this are not worth a second thread
PIECE = 2**20  # weights that are floats at a time: they stay in the cache
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Weight(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "zeros")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "group", "groups", "stride")),
        ("kind", ctypes.c_int32),
    ]


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | None:
    library = load_library(Path(__file__).with_name("quant_linear.c"), ["-ffp-contract=fast", "-Wno-psabi"])
    if library is not None:
        pointer = ctypes.c_void_p
        number = ctypes.c_int
        library.multiply.argtypes = [pointer] * 3 + [number] * 3
        library.dequantize.argtypes = [pointer] * 2 + [number] * 3
        library.multiply.restype = library.dequantize.restype = None
    return library


class Native:
    """A packed weight as the kernels see it: addresses of tensors, which a layer asks for again if they moved."""

    def __init__(
        self, library: ctypes.CDLL, tensors: tuple[Tensor, Tensor, Tensor], inputs: int, group: int, bits: int
    ) -> None:
        packed, scales, zeros = self.tensors = tensors  # alive as long as their addresses are in use
        self.library = library
        self.bits = bits
        self.inputs = inputs
        self.outputs = len(packed)
        self.pointers = packed.data_ptr(), scales.data_ptr(), zeros.data_ptr()
        self.struct = _Weight(
            *self.pointers,
            self.outputs,
            inputs,
            group,
            scales.shape[1],
            4 * packed.shape[1],
            KINDS[scales.dtype],
        )
        self.at = ctypes.addressof(self.struct)

    def multiply(self, x: Tensor) -> Tensor:
        """x W^T in float32, for few rows x of shape (..., inputs)."""
        if not (x.dtype == torch.float32 and x.is_contiguous()):
            x = x.detach().float().contiguous()
        out = torch.empty(*x.shape[:-1], self.outputs)
        rows = x.numel() // self.inputs
        source = x.data_ptr()
        target = out.data_ptr()
        threads = self._threads()
        while rows > 0:
            if rows >= 8:
                count = 8
            elif rows >= 4:
                count = 4
            elif rows >= 2:
                count = 2
            else:
                count = 1
            self.library.multiply(self.at, source, target, self.bits, count, threads)
            rows -= count
            source += 4 * count * self.inputs
            target += 4 * count * self.outputs
        return out

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """W, bit for bit what QuantizedWeight.dequantize gives."""
        out = torch.empty(self.outputs, self.inputs, dtype=_written(dtype))
        return self._fill(out, 0).to(dtype)

    def product(self, x: Tensor) -> Tensor:
        """x W^T for many rows x of shape (..., inputs)."""
        rows = x.reshape(-1, self.inputs)
        out = x.new_empty(len(rows), self.outputs)
        for at, piece in self._pieces(x.dtype):
            out[:, at] = rows @ piece.T
        return out.view(*x.shape[:-1], self.outputs)

    def gradient(self, grad: Tensor) -> Tensor:
        """grad W: what the product gives back to x."""
        total = torch.zeros(len(grad), self.inputs, dtype=torch.promote_types(grad.dtype, torch.float32))
        for at, piece in self._pieces(grad.dtype):
            total += grad[:, at] @ piece
        return total.to(grad.dtype)

    def _pieces(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Rows of W in one buffer again and again: fresh memory for all of W costs more than the product."""
        step = min(self.outputs, max(PIECE // self.inputs, 1))
        buffer = torch.empty(step, self.inputs, dtype=_written(dtype))
        for start in range(0, self.outputs, step):
            end = min(start + step, self.outputs)
            yield slice(start, end), self._fill(buffer[: end - start], start).to(dtype)

    def _fill(self, out: Tensor, start: int) -> Tensor:
        """Rows of W from `start` on, as many as `out` has."""
        w = self.struct
        size = self.tensors[1].element_size()
        rows = _Weight(
            w.packed + start * w.stride,
            w.scales + start * w.groups * size,
            w.zeros + start * w.groups,
            len(out),
            w.inputs,
            w.group,
            w.groups,
            w.stride,
            w.kind,
        )
        half = out.dtype == torch.bfloat16
        self.library.dequantize(ctypes.byref(rows), out.data_ptr(), self.bits, half, self._threads())
        return out

    def _threads(self) -> int:
        if self.inputs * self.outputs < ALONE:
            return 1
        return torch.get_num_threads()


def _written(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the kernel writes for a result in `dtype`."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def wanted() -> bool:
    return switch.wanted()


def for_gpu(x: Tensor) -> Any:
    """The Triton kernels, where `x` is on a CUDA device and triton is installed."""
    if not x.is_cuda or not wanted() or torch.compiler.is_compiling():
        return None
    return _triton()


@lru_cache(maxsize=1)
def _triton() -> Any:
    try:
        from sparsebit.llm.layers import triton_kernels
    except ImportError:
        return None
    return triton_kernels


def native(
    tensors: tuple[Tensor, Tensor, Tensor], inputs: int, group: int | None, bits: int
) -> Native | None:
    """The weight for the kernels, where they take it: whole vectors of inputs in every group, contiguous on the CPU."""
    _, scales, zeros = tensors
    fits = (
        all(t.device.type == "cpu" and t.is_contiguous() for t in tensors)
        and inputs % LANES == 0
        and (group or LANES) % LANES == 0
        and scales.dtype in KINDS
        and zeros.dtype == torch.uint8
    )
    library = _load() if fits else None
    if library is None:
        return None
    return Native(library, tensors, inputs, group or inputs, bits)
