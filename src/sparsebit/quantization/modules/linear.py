"""Linear and Bilinear: the weight and every input are quantized."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.quantization.modules.base import (
    MultipleInputsQuantOpr,
    QuantOpr,
    define,
    register_qmodule,
    spelled,
)
from sparsebit.quantization.modules.conv import ComputedWeight
from sparsebit.quantization.modules.unary import QIdentity


@register_qmodule(sources=[nn.Linear])
class QLinear(QuantOpr, nn.Linear):
    input_axis = -1
    sums_pairs = True

    def forward(self, input: Tensor) -> Tensor:
        x = self.quantized_input(input)
        weight = self.quantized_weight()
        return nn.functional.linear(x, weight, self.current_bias)

    def weight_group(self, asked: int | None) -> int | None:
        inputs = self.in_features
        if asked is None or asked >= inputs:
            return None
        if inputs % asked:
            raise ConfigError(
                f"W.GROUP: {inputs} inputs cannot be split into groups of {asked}; choose a divisor, or GROUP: null "
                f"for this layer by W.SPECIFIC"
            )
        return asked

    def output_shift(self, error: Tensor, mean: Tensor) -> Tensor:
        return error @ mean


@register_qmodule(sources=[nn.Bilinear])
class QBilinear(QuantOpr, nn.Bilinear):
    """The two inputs have separate grids; `second` carries that of `input2`."""

    input_axis = -1
    input_name = "input1"

    def __init__(self, org_module: Any = None, config: Any = None):
        super().__init__(org_module, config)
        self.second = QIdentity()

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        x = self.quantized_input(input1)
        y = self.second(input2)
        return nn.functional.bilinear(x, y, self.quantized_weight(), self.bias)


class _Bilinear(MultipleInputsQuantOpr):
    operands = ((0, "input1"), (1, "input2"), (2, "weight"))


LinearFunction = define("LinearFunction", ComputedWeight, *spelled("linear"))
BilinearFunction = define("BilinearFunction", _Bilinear, *spelled("bilinear"))
