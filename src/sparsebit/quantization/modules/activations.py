"""Activations: one row each, in every spelling torch has for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.quantization.modules.base import Opr, QuantOpr, define, spelled
from sparsebit.quantization.quantizers import Mode


class _Clip(QuantOpr):
    """An activation that only clips; it works in place where that is safe."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args = self.quantize_first(args, kwargs)
        if not args or self.reuse is None or not self.reuse.allows(args[0]):
            return self.op(*args, **kwargs)
        return args[0].relu_()


class _Clip6(QuantOpr):
    """ReLU6. Once `equalize` has scaled the channels, each channel has a different upper bound."""

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
        if x.requires_grad:
            return torch.minimum(x, self.cap)
        return torch.minimum(x, self.cap, out=x)


class _Softmax(QuantOpr):
    """Softmax over one dimension. The -inf or -1e9 of a mask must not stretch the grid. A value that is `SPAN` below
    the largest value of its row has no probability (exp(-16) is 1e-7), and saturates. A row that is completely masked
    has equal values, which any grid keeps equal."""

    SPAN = 16.0

    def quantize_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        x = args[0] if args else kwargs.get("input")
        observes = self.input_quantizer is not None and self.input_quantizer.mode is Mode.OBSERVE
        if not observes or not isinstance(x, Tensor) or not x.is_floating_point():
            return super().quantize_first(args, kwargs)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else getattr(self.op, "dim", None))
        if isinstance(dim, int):
            top = x.amax(dim, keepdim=True)
            top = torch.where(x.amin(dim, keepdim=True) == top, x.amax(), top)
            self.quantized_input(x.maximum(top - self.SPAN))
        else:  # the old default, or Softmax2d
            self.quantized_input(x)
        return args


QReLU = define("QReLU", _Clip, nn.ReLU, *spelled("relu"))
QReLU6 = define("QReLU6", _Clip6, nn.ReLU6, *spelled("relu6"))
QLeakyReLU = define("QLeakyReLU", QuantOpr, nn.LeakyReLU, *spelled("leaky_relu"))
QRReLU = define("QRReLU", QuantOpr, nn.RReLU, *spelled("rrelu"))
QPReLU = define("QPReLU", QuantOpr, nn.PReLU, *spelled("prelu"))
QELU = define("QELU", QuantOpr, nn.ELU, *spelled("elu"))
QSELU = define("QSELU", QuantOpr, nn.SELU, *spelled("selu"))
QCELU = define("QCELU", QuantOpr, nn.CELU, *spelled("celu"))
QSigmoid = define("QSigmoid", QuantOpr, nn.Sigmoid, *spelled("sigmoid expit"))
QSiLU = define("QSiLU", QuantOpr, nn.SiLU, *spelled("silu"))
QGELU = define("QGELU", QuantOpr, nn.GELU, *spelled("gelu"))
QMish = define("QMish", QuantOpr, nn.Mish, *spelled("mish"))
QTanh = define("QTanh", QuantOpr, nn.Tanh, *spelled("tanh"))
QHardSigmoid = define("QHardSigmoid", QuantOpr, nn.Hardsigmoid, *spelled("hardsigmoid"))
QHardSwish = define("QHardSwish", QuantOpr, nn.Hardswish, *spelled("hardswish"))
QHardTanh = define("QHardTanh", QuantOpr, nn.Hardtanh, *spelled("hardtanh"))
QHardShrink = define("QHardShrink", QuantOpr, nn.Hardshrink, *spelled("hardshrink"))
QSoftShrink = define("QSoftShrink", QuantOpr, nn.Softshrink, *spelled("softshrink"))
QTanhShrink = define("QTanhShrink", QuantOpr, nn.Tanhshrink, *spelled("tanhshrink"))
QThreshold = define("QThreshold", QuantOpr, nn.Threshold, *spelled("threshold _threshold"))
QSoftplus = define("QSoftplus", QuantOpr, nn.Softplus, *spelled("softplus"))
QSoftsign = define("QSoftsign", QuantOpr, nn.Softsign, *spelled("softsign"))
QLogSigmoid = define("QLogSigmoid", QuantOpr, nn.LogSigmoid, *spelled("logsigmoid"))
QGLU = define("QGLU", QuantOpr, nn.GLU, *spelled("glu"))
QSoftmax = define("QSoftmax", _Softmax, nn.Softmax, nn.Softmax2d, *spelled("softmax"))
QSoftmin = define("QSoftmin", QuantOpr, nn.Softmin, *spelled("softmin"))
QLogSoftmax = define("QLogSoftmax", QuantOpr, nn.LogSoftmax, *spelled("log_softmax"))
QGumbelSoftmax = define("QGumbelSoftmax", Opr, *spelled("gumbel_softmax"), doc="Random: stays float.")
