"""From a value range to scale and zero point.

    symmetric: scale = 2 max|x| / levels        affine: scale = (max - min) / levels, zp = qmin - round(min / scale)

The range is widened to hold 0, so that zero padding and ReLU are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebit.numeric.spec import QParams, QuantSpec

SMALLEST_SCALE = 1e-30  # below this a range counts as empty, and its scale is 1


def qparams_from_minmax(min_val: Tensor, max_val: Tensor, spec: QuantSpec) -> QParams:
    lo = min_val.detach().float().reshape(-1).clamp(max=0.0)
    hi = max_val.detach().float().reshape(-1).clamp(min=0.0)
    if spec.symmetric:
        scale = torch.maximum(-lo, hi) / (max(spec.levels, 1) / 2)
        scale = torch.where(scale < SMALLEST_SCALE, torch.ones_like(scale), scale)
        return QParams(scale, torch.zeros_like(scale))
    scale = hi / spec.levels - lo / spec.levels  # hi - lo may overflow
    scale = torch.where(scale < SMALLEST_SCALE, torch.ones_like(scale), scale)
    zero_point = (spec.qmin - (lo / scale).round()).clamp(spec.qmin, spec.qmax)
    return QParams(scale, zero_point)


def minmax_from_qparams(qparams: QParams, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value the codes can stand for."""
    return (
        (spec.qmin - qparams.zero_point) * qparams.scale,
        (spec.qmax - qparams.zero_point) * qparams.scale,
    )
