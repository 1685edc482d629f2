"""Orthogonal matrices that spread outliers: a Hadamard matrix with random signs, for any width.

Q = diag(signs) (O x H) with H = H_2 x ... x H_2 / 2^(n/2) of the largest power of two in the width (x is the Kronecker
product) and O a random orthogonal matrix of the remaining factor, such as 9 of 576 = 9 * 64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hadamard(size: int) -> Tensor:
    """(size, size) in float64, orthonormal; size is a power of two."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / math.sqrt(size)


def rotation(width: int, seed: int = 0) -> Tensor:
    """(width, width) in float64 with Q Q^T = 1, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    power = width & -width
    square = torch.randn(width // power, width // power, generator=generator, dtype=torch.float64)
    rest = torch.linalg.qr(square)[0].contiguous()
    signs = torch.randint(0, 2, (width,), generator=generator).double() * 2 - 1
    return signs[:, None] * torch.kron(rest, hadamard(power))
