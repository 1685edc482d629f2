"""DoReFa: weights pass through tanh before they are rounded (Zhou et al., DoReFa-Net, 2016).

w' = tanh(w) / max|tanh(w)|, then uniform on [-1, 1]
"""

from __future__ import annotations

from torch import Tensor

from sparsebit.quantization.quantizers import register_quantizer
from sparsebit.quantization.quantizers.base import Quantizer as BaseQuantizer


@register_quantizer
class DoReFaQuantizer(BaseQuantizer):
    TYPE = "dorefa"

    def transform(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        y = x.tanh()
        return y / y.abs().max().clamp_min(1e-12)

    def update_observer(self, x: Tensor) -> None:
        super().update_observer(self.transform(x))

    def _forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        return super()._forward(self.transform(x), scale, zero_point)


Quantizer = DoReFaQuantizer
