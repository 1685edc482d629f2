"""Uniform: round to an even grid, gradients pass straight through. Grid from the observer."""

from __future__ import annotations

from sparsebit.quantization.quantizers import register_quantizer
from sparsebit.quantization.quantizers.base import Quantizer as BaseQuantizer


@register_quantizer
class UniformQuantizer(BaseQuantizer):
    TYPE = "uniform"


Quantizer = UniformQuantizer
