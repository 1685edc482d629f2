"""Pure tensor functions; imports torch and nothing of Sparsebit but its errors."""

from sparsebit.numeric.fake_quant import dequantize, fake_quantize, quantize_to_int
from sparsebit.numeric.qparams import minmax_from_qparams, qparams_from_minmax
from sparsebit.numeric.spec import QParams, QuantSpec, as_channels, broadcast, in_groups

__all__ = [
    "QParams",
    "QuantSpec",
    "as_channels",
    "broadcast",
    "dequantize",
    "fake_quantize",
    "in_groups",
    "minmax_from_qparams",
    "qparams_from_minmax",
    "quantize_to_int",
]
