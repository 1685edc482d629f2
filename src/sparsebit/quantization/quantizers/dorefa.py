"""DoReFa: weights pass through tanh before they are rounded (Zhou et al., DoReFa-Net, 2016).

w' = tanh(w) / max|tanh(w)|, then uniform on [-1, 1]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.quantization.quantizers import register_quantizer
from sparsebit.quantization.quantizers.base import Quantizer as BaseQuantizer


@register_quantizer
class DoReFaQuantizer(BaseQuantizer):
    TYPE = "dorefa"
    broadcasts = False
    plain: Tensor  # True: the values are what tanh made of them already

    def __init__(self, config: Any):
        super().__init__(config)
        self.register_buffer("plain", torch.tensor(False))
        self._plain = False  # the same as a plain value: an exporter cannot branch on a tensor

    def drop_transform(self) -> None:
        """Only round from now on: a folded batch norm has changed the weights, and with them their maximum."""
        self.plain.fill_(True)
        self._plain = True

    def transform(self, x: Tensor) -> Tensor:
        if self._plain or not x.numel():
            return x
        y = x.tanh()
        return y / y.abs().max().clamp_min(1e-12)

    def update_observer(self, x: Tensor) -> None:
        super().update_observer(self.transform(x))

    def _forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        return super()._forward(self.transform(x), scale, zero_point)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._plain = bool(state_dict.setdefault(prefix + "plain", torch.tensor(False)))
        super()._load_from_state_dict(state_dict, prefix, *args)


Quantizer = DoReFaQuantizer
