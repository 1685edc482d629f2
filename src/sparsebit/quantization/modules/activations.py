"""Activations: one row each, in every spelling torch has for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sparsebit.quantization.modules.base import QuantOpr, define

QReLU = define("QReLU", QuantOpr, nn.ReLU, F.relu, torch.relu, "relu")
QReLU6 = define("QReLU6", QuantOpr, nn.ReLU6, F.relu6)
QLeakyReLU = define("QLeakyReLU", QuantOpr, nn.LeakyReLU, F.leaky_relu)
QSigmoid = define("QSigmoid", QuantOpr, nn.Sigmoid, F.sigmoid, torch.sigmoid, "sigmoid")
QSiLU = define("QSiLU", QuantOpr, nn.SiLU, F.silu)
QGELU = define("QGELU", QuantOpr, nn.GELU, F.gelu)
QMish = define("QMish", QuantOpr, nn.Mish, F.mish)
QHardSigmoid = define("QHardSigmoid", QuantOpr, nn.Hardsigmoid, F.hardsigmoid)
QTanh = define("QTanh", QuantOpr, nn.Tanh, F.tanh, torch.tanh, "tanh")
QSoftmax = define("QSoftmax", QuantOpr, nn.Softmax, F.softmax, torch.softmax, "softmax")
