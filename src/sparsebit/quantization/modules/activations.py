"""Activations: one row each, in every spelling torch has for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sparsebit.quantization.modules.base import QuantOpr, define


class _Clip(QuantOpr):
    """An activation that only clips; it works in place where that is safe."""

    low, high = 0.0, float("inf")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.reuse is None or not self.reuse.allows(args[0]):
            return super().forward(*args, **kwargs)
        x = self.quantize_first(args, kwargs)[0]
        return x.relu_() if self.high == float("inf") else x.clamp_(self.low, self.high)


class _Clip6(_Clip):
    high = 6.0


QReLU = define("QReLU", _Clip, nn.ReLU, F.relu, torch.relu, "relu")
QReLU6 = define("QReLU6", _Clip6, nn.ReLU6, F.relu6)
QLeakyReLU = define("QLeakyReLU", QuantOpr, nn.LeakyReLU, F.leaky_relu)
QSigmoid = define("QSigmoid", QuantOpr, nn.Sigmoid, F.sigmoid, torch.sigmoid, "sigmoid")
QSiLU = define("QSiLU", QuantOpr, nn.SiLU, F.silu)
QGELU = define("QGELU", QuantOpr, nn.GELU, F.gelu)
QMish = define("QMish", QuantOpr, nn.Mish, F.mish)
QHardSigmoid = define("QHardSigmoid", QuantOpr, nn.Hardsigmoid, F.hardsigmoid)
QTanh = define("QTanh", QuantOpr, nn.Tanh, F.tanh, torch.tanh, "tanh")
QSoftmax = define("QSoftmax", QuantOpr, nn.Softmax, F.softmax, torch.softmax, "softmax")
