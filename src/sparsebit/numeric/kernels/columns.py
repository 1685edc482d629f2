"""Calls of the native column loops (columns.c) on torch tensors: float32 on the CPU."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.numeric import kernels as switch
from sparsebit.numeric.kernels.build import load_library

ALONE = 256  # fewer rows than this are not worth a second thread


def library_for(w: Tensor) -> ctypes.CDLL | None:
    """The native loops, where they take `w`."""
    if switch.wanted() and w.dtype == torch.float32 and w.device.type == "cpu":
        return _load()
    return None


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | None:
    library = load_library(Path(__file__).with_name("columns.c"), ["-ffp-contract=fast"])
    if library is not None:
        pointer = ctypes.c_void_p
        size = ctypes.c_int64
        real = ctypes.c_float
        threads = ctypes.c_int
        end: list[Any] = [*[pointer] * 3, size, size, real, threads]
        library.greedy.argtypes = [*[pointer] * 3, size, pointer, pointer, *end]
        library.descend.argtypes = [*[pointer] * 4, size, *end]
        library.least.argtypes = [*[pointer] * 4, *[size] * 4, real, pointer, pointer, threads]
        library.greedy.restype = library.descend.restype = library.least.restype = None
    return library


class Columns:
    """Grids of columns: column j has the scales and zeros of group index[j]; (groups, rows), contiguous."""

    def __init__(self, lib: ctypes.CDLL, index: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> None:
        self.lib = lib
        self.index = index.contiguous()
        self.scales = scales
        self.zeros = zeros
        self.rows = scales.shape[1]
        self.top = float(2**bits - 1)

    def greedy(
        self, wt: Tensor, errors: Tensor, u: Tensor, codes: Tensor, order: Tensor, start: int, stop: int
    ) -> None:
        """Rounds columns start:stop of wt, in place, and fills in their errors; all tensors are contiguous."""
        block = u[start:stop, start:stop]
        self.lib.greedy(
            wt[start].data_ptr(),
            errors.data_ptr(),
            block.data_ptr(),
            u.stride(0),
            codes.data_ptr(),
            order[start].data_ptr(),
            *self._end(start, stop),
        )

    def descend(self, pull: Tensor, gap: Tensor, codes: Tensor, h: Tensor, start: int, stop: int) -> None:
        """Moves codes[start:stop] and keeps gap = w - q up to date; pull = h[start:stop] @ gap is used up."""
        block = h[start:stop, start:stop]
        self.lib.descend(
            pull.data_ptr(),
            gap[start].data_ptr(),
            codes[start].data_ptr(),
            block.data_ptr(),
            h.stride(0),
            *self._end(start, stop),
        )

    def _end(self, start: int, stop: int) -> tuple[int | float, ...]:
        threads = 1 if self.rows < ALONE else torch.get_num_threads()
        grids = self.index[start].data_ptr(), self.scales.data_ptr(), self.zeros.data_ptr()
        return *grids, stop - start, self.rows, self.top, threads


def of(w: Tensor, index: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Columns | None:
    """The native loops for the columns of w, scales and zeros being (rows, groups); None where they do not take it."""
    lib = library_for(w)
    if lib is None:
        return None
    return Columns(lib, index, scales.float().T.contiguous(), zeros.float().T.contiguous(), bits)


def least(
    lib: ctypes.CDLL, w: Tensor, importance: Tensor, scales: Tensor, zeros: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """The best of several grids (tries, *groups) for w (*groups, size): the one that loses least in each group.

    importance   (size,) or, for w (rows, groups, size), (groups, size).
    """
    w = w.contiguous()
    scales = scales.contiguous()
    zeros = zeros.contiguous()
    importance = importance.float().contiguous()
    best = torch.empty_like(scales[0]), torch.empty_like(zeros[0])
    count = best[0].numel()
    lib.least(
        w.data_ptr(),
        importance.data_ptr(),
        scales.data_ptr(),
        zeros.data_ptr(),
        len(scales),
        count,
        w.shape[-1],
        importance.numel() // w.shape[-1],
        float(2**bits - 1),
        best[0].data_ptr(),
        best[1].data_ptr(),
        1 if count < ALONE else torch.get_num_threads(),
    )
    return best
