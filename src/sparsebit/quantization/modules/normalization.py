"""Normalisations. A BatchNorm is folded into the op before it, or stays float; a LayerNorm quantizes its input."""

from __future__ import annotations

from torch import Tensor, nn

from sparsebit.quantization.modules.base import Opr, QuantOpr, register_qmodule


@register_qmodule(sources=[nn.BatchNorm2d])
class QBatchNorm2d(QuantOpr, nn.BatchNorm2d):
    quantize_weight = quantize_input = False

    def forward(self, input: Tensor) -> Tensor:
        return nn.BatchNorm2d.forward(self, input)


@register_qmodule(sources=[nn.BatchNorm1d])
class QBatchNorm1d(Opr, nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return nn.BatchNorm1d.forward(self, input)


@register_qmodule(sources=[nn.LayerNorm])
class QLayerNorm(QuantOpr, nn.LayerNorm):
    quantize_weight = False

    def forward(self, input: Tensor) -> Tensor:
        return nn.LayerNorm.forward(self, self.quantized_input(input))
