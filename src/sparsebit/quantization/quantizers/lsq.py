"""LSQ: the scale is learned (Esser et al., Learned Step Size Quantization, ICLR 2020).

It starts with the scale of the observer: mse, unless the config names another one. minmax is not made for few bits;
with it, the scale starts as in the paper, at 2 mean|x| / sqrt(q), q the code farthest from 0. Its gradient is scaled by
1 / sqrt(values * qmax). An affine scheme keeps the zero point of calibration: 0 for the values of a ReLU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError
from sparsebit.numeric import QuantSpec, as_channels, in_groups
from sparsebit.quantization.common import QuantTarget
from sparsebit.quantization.observers.ranks import RunningSum, world_size
from sparsebit.quantization.quantizers import register_quantizer
from sparsebit.quantization.quantizers.base import Quantizer as BaseQuantizer


def gs_scaling(x: Tensor, ratio: float) -> Tensor:
    """`x` itself, to the last bit, with its gradient multiplied by `ratio`."""
    scaled = x * ratio
    return x.detach() + (scaled - scaled.detach())


def lsq_grad_scale(x: Tensor, quantizer: BaseQuantizer) -> float:
    """1 / sqrt(values per scale * qmax): scales then learn as fast as weights.

    Values of the whole batch: ranks that share it give the gradient that one process would.
    """
    if quantizer.qdesc.target is QuantTarget.WEIGHT:
        ranks = 1
    else:
        ranks = world_size()
    values = x.numel() * ranks / quantizer.scale.numel()
    return 1.0 / max(values * quantizer.spec.qmax, 1.0) ** 0.5


@register_quantizer
class LSQQuantizer(BaseQuantizer):
    TYPE = "lsq"
    START = "mse"
    keeps_batches = False

    def __init__(self, config: Any):
        super().__init__(config)
        del self.scale
        self.scale = nn.Parameter(torch.zeros(1))
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.sizes = RunningSum()

    def update_observer(self, x: Tensor) -> None:
        super().update_observer(x)
        rows = as_channels(in_groups(x.detach(), self.spec.group), self.spec.axis)
        self.sizes.add(rows.abs().sum(1, dtype=torch.float64), rows.shape[1])

    def calc_qparams(self) -> tuple[Tensor, Tensor]:
        if self.absorbed:
            return self.scale, self.zero_point
        if self.sizes.empty:
            raise CalibrationError(
                f"{self.name or 'lsq'}: saw no data; run some batches before calc_qparams()"
            )
        super().calc_qparams()  # keeps the range for repr and set_bit, and gives an affine scheme its zero point
        if self.observer.TYPE != "minmax":
            return self.scale, self.zero_point
        spec = self.spec
        zero_point = self.zero_point
        farthest = torch.full_like(zero_point, spec.qmax)
        if not spec.symmetric:
            farthest = torch.maximum(spec.qmax - zero_point, zero_point - spec.qmin)
        mean = self.sizes.mean().to(zero_point.device)
        scale = (2 * mean / farthest.double().clamp(min=1).sqrt()).float()
        return self._set_qparams(torch.where(scale > 0, scale, torch.ones_like(scale)), zero_point)

    def _regrid(self, old: QuantSpec) -> None:
        zero_point = (self.zero_point * (self.spec.levels / old.levels)).round()
        self._set_qparams(self.scale * (max(old.qmax, 1) / max(self.spec.qmax, 1)) ** 0.5, zero_point)

    def _qparams_preprocess(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale.abs(), self.zero_point

    def grad_scale(self, x: Tensor) -> float:
        return lsq_grad_scale(x, self)


Quantizer = LSQQuantizer
