"""Weights in GGUF's blocks of 32 inputs. Codes that were solved are kept wherever a block can hold their grid.

Q4_0   scale * (code - 8)         a float16 scale, then 4-bit codes: input i and i + 16 share a byte
Q4_1   scale * code + offset      a float16 scale, a float16 offset, then 4-bit codes
Q8_0   scale * code               a float16 scale, then signed 8-bit codes
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsebit.errors import ExportError
from sparsebit.numeric.quantized_weight import QuantizedWeight

RUN = 32  # inputs of one block
EXACT = "exact"
ROUNDED = "grid rounded to float16"
REQUANTIZED = "requantized"


@dataclass(frozen=True)
class Fit:
    """How a solved layer is stored: the kind of block, and what happens to its values."""

    kind: str
    change: str = EXACT
    why: str = ""


def fit(q: QuantizedWeight) -> Fit:
    """The block that holds the layer with its own codes; else Q8_0, which rounds the values again."""
    group = q.group or q.shape[1]
    if q.shape[1] % RUN:
        return Fit("F16", REQUANTIZED, f"{q.shape[1]} inputs are no multiple of {RUN}")
    if q.g_idx is not None:
        return Fit("Q8_0", REQUANTIZED, "its groups are not runs of inputs (act_order without static_groups)")
    if group % RUN or q.shape[1] % group:
        return Fit("Q8_0", REQUANTIZED, f"groups of {group} inputs are no multiple of {RUN}")
    if q.bits == 8 and not q.symmetric:
        return Fit("Q8_0", REQUANTIZED, "no block holds 8 bits with a zero point")
    if not bool(torch.isfinite(q.scales.to(torch.float16)).all()):
        return Fit("Q8_0", REQUANTIZED, "a scale is too large for float16")
    if q.bits == 8:
        kind = "Q8_0"
    elif q.symmetric:
        kind = "Q4_0"
    else:
        kind = "Q4_1"
    if _exact(q):
        return Fit(kind)
    return Fit(kind, ROUNDED, "a scale or an offset is not a float16 number")


def pack(q: QuantizedWeight, name: str = "weight") -> np.ndarray:
    """(outputs, bytes) uint8: the blocks of a layer whose codes can be kept."""
    found = fit(q)
    if found.change == REQUANTIZED:
        raise ExportError(
            f"{name}: no GGUF block holds these codes: {found.why}; quantize with bits=4 or 8 and group_size=32 or 64"
        )
    steps = _per_run(q, q.scales.float())
    runs = q.codes.cpu().numpy().reshape(q.shape[0], -1, RUN)
    if found.kind == "Q8_0":
        body = (runs.astype(np.int16) - 128).astype(np.int8).view(np.uint8)
        return _rows([steps, body])
    if found.kind == "Q4_1":
        levels = runs
    else:
        levels = runs + np.uint8(8 - 2 ** (q.bits - 1))
    body = levels[..., : RUN // 2] | (levels[..., RUN // 2 :] << np.uint8(4))
    if found.kind == "Q4_1":
        return _rows([steps, _per_run(q, _offsets(q)), body])
    return _rows([steps, body])


def _exact(q: QuantizedWeight) -> bool:
    """True if float16 holds the grid: a scale may be bfloat16 or float32, and an offset has more digits than its
    scale."""
    if q.symmetric:
        grids = [q.scales.float()]
    else:
        grids = [q.scales.float(), _offsets(q)]
    return all(torch.equal(grid.to(torch.float16).float(), grid) for grid in grids)


def _offsets(q: QuantizedWeight) -> Tensor:
    return -q.zeros.float() * q.scales.float()


def _per_run(q: QuantizedWeight, grid: Tensor) -> np.ndarray:
    """(outputs, runs, 2) bytes: the float16 value of each block."""
    group = q.group or q.shape[1]
    halves = grid.to(torch.float16).repeat_interleave(group // RUN, 1).cpu().numpy()
    return halves[..., None].view(np.uint8)


def _rows(parts: list[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(np.concatenate(parts, -1).reshape(len(parts[0]), -1))
