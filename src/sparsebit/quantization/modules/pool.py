"""Pools. Averages make new values, so their input is quantized; a maximum picks values that already are."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from sparsebit.quantization.modules.base import Mover, Opr, QuantOpr, define, spelled


class _Mean(QuantOpr):
    """A mean. Over the last axis, which is kept, it is part of a norm written by hand: squares, which stay float."""

    def __init__(self, org_module: Any = None, config: Any = None):
        super().__init__(org_module, config)
        if isinstance(org_module, fx.Node):
            args = org_module.args
            kwargs = org_module.kwargs
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
            if keep is True and (dim == -1 or dim in ([-1], (-1,))):
                self.__dict__["quantize_input"] = False


QAvgPool1d = define("QAvgPool1d", QuantOpr, nn.AvgPool1d, *spelled("avg_pool1d"))
QAvgPool2d = define("QAvgPool2d", QuantOpr, nn.AvgPool2d, *spelled("avg_pool2d"))
QAvgPool3d = define("QAvgPool3d", QuantOpr, nn.AvgPool3d, *spelled("avg_pool3d"))
QAdaptiveAvgPool1d = define(
    "QAdaptiveAvgPool1d", QuantOpr, nn.AdaptiveAvgPool1d, *spelled("adaptive_avg_pool1d")
)
QAdaptiveAvgPool2d = define(
    "QAdaptiveAvgPool2d", QuantOpr, nn.AdaptiveAvgPool2d, *spelled("adaptive_avg_pool2d")
)
QAdaptiveAvgPool3d = define(
    "QAdaptiveAvgPool3d", QuantOpr, nn.AdaptiveAvgPool3d, *spelled("adaptive_avg_pool3d")
)
QLPPool = define(
    "QLPPool", QuantOpr, nn.LPPool1d, nn.LPPool2d, nn.LPPool3d, *spelled("lp_pool1d lp_pool2d lp_pool3d")
)
QMean = define("QMean", _Mean, *spelled("mean"))

MaxPool1d = define("MaxPool1d", Mover, nn.MaxPool1d, *spelled("max_pool1d max_pool1d_with_indices"))
MaxPool2d = define("MaxPool2d", Mover, nn.MaxPool2d, *spelled("max_pool2d max_pool2d_with_indices"))
MaxPool3d = define("MaxPool3d", Mover, nn.MaxPool3d, *spelled("max_pool3d max_pool3d_with_indices"))
AdaptiveMaxPool = define(
    "AdaptiveMaxPool",
    Mover,
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *spelled("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"),
    *spelled(
        "adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices"
    ),
)
FractionalMaxPool = define(
    "FractionalMaxPool",
    Mover,
    *(nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
    *spelled("fractional_max_pool2d fractional_max_pool3d"),
    *spelled("fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices"),
)
MaxUnpool = define(
    "MaxUnpool",
    Opr,
    *(nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d),
    *spelled("max_unpool1d max_unpool2d max_unpool3d"),
)
