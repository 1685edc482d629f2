"""Matrix product of two activations: both are quantized."""

from __future__ import annotations

import operator

import torch

from sparsebit.quantization.modules.base import MultipleInputsQuantOpr, define

MatMul = define("MatMul", MultipleInputsQuantOpr, operator.matmul, torch.matmul, "matmul")
