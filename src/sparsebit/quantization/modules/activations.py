"""Activations: one row each, in every spelling torch has for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.quantization.modules.base import QuantOpr, define


class _Clip(QuantOpr):
    """An activation that only clips; it works in place where that is safe."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args = self.quantize_first(args, kwargs)
        if not args or self.reuse is None or not self.reuse.allows(args[0]):
            return self.op(*args, **kwargs)
        return args[0].relu_()


class _Clip6(QuantOpr):
    """ReLU6. Once `equalize` has scaled the channels, each has an upper bound of its own."""

    cap: Tensor | None

    def __init__(self, org_module: Any = None, config: Any = None):
        super().__init__(org_module, config)
        self.register_buffer("cap", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args = self.quantize_first(args, kwargs)
        x = args[0] if args else None
        inplace = self.reuse is not None and self.reuse.allows(x)
        if not isinstance(x, Tensor) or (self.cap is None and not inplace):
            return self.op(*args, **kwargs)
        x = x.relu_() if inplace else x.relu()
        if self.cap is None:
            return x.clamp_(max=6.0)
        return torch.minimum(x, self.cap) if x.requires_grad else torch.minimum(x, self.cap, out=x)


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
