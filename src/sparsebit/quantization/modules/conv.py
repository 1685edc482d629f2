"""Convolutions: weight and input are quantized, then torch's own convolution runs with all of its options."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.quantization.modules.base import QuantOpr, register_qmodule


@register_qmodule(sources=[nn.Conv2d])
class QConv2d(QuantOpr, nn.Conv2d):
    input_axis = -3

    def forward(self, input: Tensor) -> Tensor:
        x, weight = self.quantized_input(input), self.quantized_weight()
        return self._conv_forward(x, weight, self.current_bias)

    def output_shift(self, error: Tensor, mean: Tensor) -> Tensor:
        taps, groups = error.flatten(2).sum(2), self.groups
        return torch.einsum("goi,gi->go", taps.unflatten(0, (groups, -1)), mean.reshape(groups, -1)).flatten()


@register_qmodule(sources=[nn.ConvTranspose2d])
class QConvTranspose2d(QuantOpr, nn.ConvTranspose2d):
    weight_axis = 1  # (in, out / groups, kH, kW)
    input_axis = -3

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        x, weight = self.quantized_input(input), self.quantized_weight()
        padding: Any = self.padding
        sizes: list[Any] = [self.stride, padding, self.kernel_size, 2, self.dilation]
        output_padding: Any = self._output_padding(x, output_size, *sizes)
        return nn.functional.conv_transpose2d(
            x, weight, self.current_bias, self.stride, padding, output_padding, self.groups, self.dilation
        )

    def output_shift(self, error: Tensor, mean: Tensor) -> Tensor:
        taps, groups = (
            error.flatten(2).sum(2) / math.prod(self.stride),
            self.groups,
        )  # a stride spreads the taps
        return torch.einsum("gio,gi->go", taps.unflatten(0, (groups, -1)), mean.reshape(groups, -1)).flatten()
