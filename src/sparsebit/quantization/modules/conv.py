"""Convolutions: weight and input are quantized, then torch's own convolution runs with all of its options."""

from __future__ import annotations

from torch import Tensor, nn

from sparsebit.quantization.modules.base import QuantOpr, register_qmodule


class _QConv(QuantOpr):
    def forward(self, x_in: Tensor) -> Tensor:
        x, weight = self.quantized_input(x_in), self.quantized_weight()
        return self._conv_forward(x, weight, self.current_bias)


@register_qmodule(sources=[nn.Conv2d])
class QConv2d(_QConv, nn.Conv2d):
    pass


@register_qmodule(sources=[nn.ConvTranspose2d])
class QConvTranspose2d(QuantOpr, nn.ConvTranspose2d):
    weight_axis = 1  # (in, out / groups, kH, kW)

    def forward(self, x_in: Tensor, output_size: list[int] | None = None) -> Tensor:
        x, weight = self.quantized_input(x_in), self.quantized_weight()
        output_padding = self._output_padding(
            x, output_size, self.stride, self.padding, self.kernel_size, 2, self.dilation
        )
        return nn.functional.conv_transpose2d(
            x, weight, self.current_bias, self.stride, self.padding, output_padding, self.groups, self.dilation
        )
