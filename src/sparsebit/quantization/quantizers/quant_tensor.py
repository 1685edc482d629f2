"""Legacy: the original's function names for fake quantization, over `sparsebit.numeric`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.numeric import QParams, fake_quantize
from sparsebit.quantization.common import Backend
from sparsebit.quantization.quantizers.quant_descriptor import QuantDescriptor


def torch_fake_quant(x: Tensor, scale: Tensor, zero_point: Tensor, qdesc: QuantDescriptor) -> Tensor:
    """`x` on the grid that `qdesc` describes."""
    return fake_quantize(x, QParams(scale.reshape(-1), zero_point.reshape(-1)), qdesc.spec)


def ort_fake_quant(x: Tensor, scale: Tensor, zero_point: Tensor, qdesc: QuantDescriptor) -> Tensor:
    return torch_fake_quant(x, scale, zero_point, qdesc)


def trt_fake_quant(x: Tensor, scale: Tensor, zero_point: Tensor, qdesc: QuantDescriptor) -> Tensor:
    if bool((zero_point != 0).any()):
        raise ConfigError("A.QSCHEME: TensorRT has no zero point; use a symmetric scheme")
    return torch_fake_quant(x, scale, zero_point, qdesc)


def ort_dqrange(scale: Tensor, zero_point: Tensor, qdesc: QuantDescriptor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest value on the grid."""
    return (qdesc.qmin - zero_point) * scale, (qdesc.qmax - zero_point) * scale


trt_dqrange = ort_dqrange

fake_quant_factory = {
    Backend.VIRTUAL: torch_fake_quant,
    Backend.ONNXRUNTIME: ort_fake_quant,
    Backend.TENSORRT: trt_fake_quant,
    Backend.OPENVINO: ort_fake_quant,
}
fake_qrange_factory = dict.fromkeys(Backend, ort_dqrange)


class STE(torch.autograd.Function):
    """`STE.apply(x, scale, zero_point, qdesc, backend)`: straight-through fake quantization."""

    @staticmethod
    def apply(
        x: Tensor, scale: Tensor, zero_point: Tensor, qdesc: QuantDescriptor, backend: Any = Backend.VIRTUAL
    ) -> Tensor:
        return fake_quant_factory[backend](x, scale, zero_point, qdesc)


MySTE = STE
