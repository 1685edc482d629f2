"""PACT: the clipping bound of activations is learned (Choi et al., PACT, 2018)."""

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

    class Params(Config):
        alpha_value: float = Field(10.0, gt=0, description="where the clipping bound starts")

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
        self.alpha = nn.Parameter(torch.tensor([float(self.params.alpha_value)]))

    def _forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Clip to [-alpha or 0, alpha] (where alpha gets its gradient), then round on the grid of that range."""
        low, alpha = self._range()
        clipped = torch.minimum(torch.maximum(x, low), alpha)
        return fake_quantize(clipped, qparams_from_minmax(low, alpha, self.spec), self.spec)

    def current_qparams(self) -> QParams:
        found = qparams_from_minmax(*self._range(), self.spec)
        return QParams(found.scale.detach(), found.zero_point.detach())

    def _range(self) -> tuple[Tensor, Tensor]:
        alpha = self.alpha.abs()
        return -alpha if self._signed() else torch.zeros_like(alpha), alpha

    def _signed(self) -> bool:
        return self.is_symmetric or bool((self.zero_point > self.spec.qmin).any())


Quantizer = PACTQuantizer
