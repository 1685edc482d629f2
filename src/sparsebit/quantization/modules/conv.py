"""Convolutions of one to three dimensions: weight and input are quantized, then torch's own convolution runs with
all of its options. A convolution whose weight is computed in the graph has quantizers in front of both."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.quantization.modules.base import (
    Computed,
    MultipleInputsQuantOpr,
    QuantOpr,
    define,
    register_qmodule,
    spelled,
)


class _Conv(QuantOpr):
    _conv_forward: Callable[..., Tensor]
    in_channels: int

    @Computed
    def fwd_kwargs(self) -> dict[str, Any]:
        """The options of the original's `F.conv2d(x, weight, bias, **fwd_kwargs)`; `padding_mode` is not among them."""
        return {name: getattr(self, name) for name in ("stride", "padding", "dilation", "groups")}

    def forward(self, input: Tensor, pad: list[int] | None = None) -> Tensor:
        """`pad`: zeros to add around the quantized input (converters/pads_into_convs.py)."""
        x = self.quantized_input(input)
        weight = self.quantized_weight()
        if pad is not None:
            x = nn.functional.pad(x, pad)
        return self._conv_forward(x, weight, self.current_bias)

    @property
    def sums_pairs(self) -> bool:
        is_depthwise = self.weight.shape[1] == 1 and self.weight.shape[0] == self.groups
        return not is_depthwise

    def output_shift(self, error: Tensor, mean: Tensor) -> Tensor:
        taps = error.flatten(2).sum(2)
        groups = self.groups
        return torch.einsum("goi,gi->go", taps.unflatten(0, (groups, -1)), mean.reshape(groups, -1)).flatten()


@register_qmodule(sources=[nn.Conv1d])
class QConv1d(_Conv, nn.Conv1d):
    input_axis = -2


@register_qmodule(sources=[nn.Conv2d])
class QConv2d(_Conv, nn.Conv2d):
    input_axis = -3


@register_qmodule(sources=[nn.Conv3d])
class QConv3d(_Conv, nn.Conv3d):
    input_axis = -4


def is_depthwise(conv: Any) -> bool:
    """One filter or more for each channel, and no other input."""
    return isinstance(conv, _Conv) and conv.groups == conv.in_channels and conv.groups > 1


def is_pointwise(conv: Any) -> bool:
    """A convolution of 1 x 1 on images: onnxruntime has an integer product for it that gives float values."""
    if not isinstance(conv, QConv2d) or conv.groups != 1 or conv.padding not in ((0, 0), "valid"):
        return False
    return conv.kernel_size == (1, 1) and conv.stride == (1, 1)


class _ConvTranspose(QuantOpr):
    weight_axis = 1  # (in, out / groups, *kernel)
    function: Callable[..., Tensor]
    stride: Any
    padding: Any
    kernel_size: Any
    dilation: Any
    _output_padding: Callable[..., Any]

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        x = self.quantized_input(input)
        weight = self.quantized_weight()
        sizes = (self.stride, self.padding, self.kernel_size, len(self.kernel_size), self.dilation)
        extra = self._output_padding(x, output_size, *sizes)
        return self.function(
            x, weight, self.current_bias, self.stride, self.padding, extra, self.groups, self.dilation
        )

    def output_shift(self, error: Tensor, mean: Tensor) -> Tensor:
        # a stride spreads the taps
        taps = error.flatten(2).sum(2) / math.prod(self.stride)
        groups = self.groups
        return torch.einsum("gio,gi->go", taps.unflatten(0, (groups, -1)), mean.reshape(groups, -1)).flatten()


@register_qmodule(sources=[nn.ConvTranspose1d])
class QConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    input_axis = -2
    function = staticmethod(nn.functional.conv_transpose1d)


@register_qmodule(sources=[nn.ConvTranspose2d])
class QConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    input_axis = -3
    function = staticmethod(nn.functional.conv_transpose2d)


@register_qmodule(sources=[nn.ConvTranspose3d])
class QConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    input_axis = -4
    function = staticmethod(nn.functional.conv_transpose3d)


class ComputedWeight(MultipleInputsQuantOpr):
    """A layer as a function whose weight is a value of the graph: that and the input are quantized, no bias is."""

    operands = ((0, "input"), (1, "weight"))


ConvFunction = define(
    "ConvFunction",
    ComputedWeight,
    *spelled("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution"),
)
