"""Pools. Averages make new values, so their input is quantized; a maximum picks values that already are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sparsebit.quantization.modules.base import Opr, QuantOpr, define

QAvgPool2d = define("QAvgPool2d", QuantOpr, nn.AvgPool2d, F.avg_pool2d)
QAdaptiveAvgPool2d = define("QAdaptiveAvgPool2d", QuantOpr, nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d)
QMean = define("QMean", QuantOpr, torch.mean, "mean")
MaxPool2d = define("MaxPool2d", Opr, nn.MaxPool2d, F.max_pool2d)
