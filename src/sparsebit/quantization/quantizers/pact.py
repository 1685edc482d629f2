"""PACT: the clipping bound of activations is learned (Choi et al., PACT, 2018).

It starts at the range of calibration, at most at ALPHA_VALUE: from above all values no gradient would bring it down.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from sparsebit.config import Config
from sparsebit.errors import ConfigError
from sparsebit.numeric import QParams, fake_quantize, qparams_from_minmax
from sparsebit.quantization.common import QuantTarget
from sparsebit.quantization.quantizers import register_quantizer
from sparsebit.quantization.quantizers.base import Quantizer as BaseQuantizer


@register_quantizer
class PACTQuantizer(BaseQuantizer):
    TYPE = "pact"
    keeps_batches = broadcasts = False

    class Params(Config):
        alpha_value: float = Field(10.0, gt=0, description="where the clipping bound starts at most")

    @classmethod
    def check(cls, cfg: Any) -> None:
        if QuantTarget.FEATURE not in cfg.target:
            raise ConfigError(
                "QUANTIZER.TYPE: pact is for activations; use uniform, lsq or dorefa for weights"
            )
        if not cfg.qscheme.startswith("per-tensor"):
            raise ConfigError(f"QSCHEME: pact needs a per-tensor scheme, got {cfg.qscheme}")

    def __init__(self, config: Any):
        super().__init__(config)
        self._negative = False
        self.alpha = nn.Parameter(torch.tensor([float(self.params.alpha_value)]))

    def _forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Clip to [-alpha or 0, alpha] (where alpha gets its gradient), then round on the grid of that range."""
        return fake_quantize(self.transform(x), qparams_from_minmax(*self._range(), self.spec), self.spec)

    def transform(self, x: Tensor) -> Tensor:
        low, alpha = self._range()
        return torch.minimum(torch.maximum(x, low.to(x)), alpha.to(x))

    def current_qparams(self) -> QParams:
        found = qparams_from_minmax(*self._range(), self.spec)
        return QParams(found.scale.detach(), found.zero_point.detach())

    def _range(self) -> tuple[Tensor, Tensor]:
        alpha = self.alpha.abs()
        return -alpha if self.is_symmetric or self._negative else torch.zeros_like(alpha), alpha

    def calc_qparams(self) -> tuple[Tensor, Tensor]:
        super().calc_qparams()
        if not self.absorbed:
            reach = torch.maximum(self.observer.max_val, -self.observer.min_val).max()
            start = reach.clamp(max=float(self.params.alpha_value))
            with torch.no_grad():
                self.alpha.copy_(torch.where(start > 0, start, self.alpha))
        return self.scale, self.zero_point

    def _set_qparams(self, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        found = super()._set_qparams(scale, zero_point)
        self._look()
        return found

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._look()

    def _look(self) -> None:
        """Did calibration see negative values? Kept as a plain value: an exporter cannot branch on a tensor."""
        self._negative = bool((self.zero_point > self.spec.qmin).any())


Quantizer = PACTQuantizer
