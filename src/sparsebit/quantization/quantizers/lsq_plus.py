"""LSQ+: scale and zero point are learned (Bhalgat et al., LSQ+, CVPR workshops 2020).

Starts at the observer's range: mse, unless the config names another. With minmax, symmetric weights start as in the
paper, at max|mean +- 3 std|. A symmetric grid has no zero point to learn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.numeric import as_channels, in_groups
from sparsebit.quantization.common import QuantTarget
from sparsebit.quantization.quantizers import register_quantizer
from sparsebit.quantization.quantizers.base import Quantizer as BaseQuantizer
from sparsebit.quantization.quantizers.lsq import lsq_grad_scale


@register_quantizer
class LSQPlusQuantizer(BaseQuantizer):
    TYPE = "lsq+"
    START = "mse"
    keeps_batches = False

    def __init__(self, config: Any):
        super().__init__(config)
        del self.scale
        self.scale = nn.Parameter(torch.zeros(1))
        if not self.is_symmetric:
            del self.zero_point
            self.zero_point = nn.Parameter(torch.zeros(1))
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._three_sigma: Tensor | None = None

    def update_observer(self, x: Tensor) -> None:
        super().update_observer(x)
        # weights come whole, so this is exact
        if QuantTarget.WEIGHT in self.cfg.target and self.is_symmetric:
            rows = as_channels(in_groups(x.detach().float(), self.spec.group), self.spec.axis)
            mean = rows.mean(1)
            std = rows.std(1, correction=0)
            self._three_sigma = torch.maximum((mean - 3 * std).abs(), (mean + 3 * std).abs())

    def calc_qparams(self) -> tuple[Tensor, Tensor]:
        super().calc_qparams()
        if self._three_sigma is not None and not self.absorbed and self.observer.TYPE == "minmax":
            scale = 2 * self._three_sigma / self.spec.levels
            self._set_qparams(torch.where(scale > 0, scale, torch.ones_like(scale)), torch.zeros_like(scale))
        return self.scale, self.zero_point

    def _qparams_preprocess(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_symmetric:
            return self.scale.abs(), self.zero_point
        # 0 stays on the grid, and the zero point a code; its gradient passes, so that it can come back
        inside = self.zero_point.detach().clamp(self.spec.qmin, self.spec.qmax)
        return self.scale.abs(), self.zero_point + (inside - self.zero_point.detach())

    def grad_scale(self, x: Tensor) -> float:
        return lsq_grad_scale(x, self)


Quantizer = LSQPlusQuantizer
