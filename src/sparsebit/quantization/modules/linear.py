"""Linear: weight and input are quantized."""

from __future__ import annotations

from torch import Tensor, nn

from sparsebit.quantization.modules.base import QuantOpr, register_qmodule


@register_qmodule(sources=[nn.Linear])
class QLinear(QuantOpr, nn.Linear):
    input_axis = -1

    def forward(self, input: Tensor) -> Tensor:
        x, weight = self.quantized_input(input), self.quantized_weight()
        return nn.functional.linear(x, weight, self.current_bias)

    def output_shift(self, error: Tensor, mean: Tensor) -> Tensor:
        return error @ mean
