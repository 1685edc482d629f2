"""Arithmetic. An Add quantizes its inputs when A.QADD.ENABLE_QUANT asks for it; the rest stays float."""

from __future__ import annotations

import operator
from typing import Any

import torch

from sparsebit.quantization.modules.base import MultipleInputsQuantOpr, Opr, define, register_qmodule


@register_qmodule(sources=[operator.add, torch.add, torch.Tensor.add])
class QAdd(MultipleInputsQuantOpr):
    @classmethod
    def wants_input_quant(cls, config: Any) -> bool:
        return bool(config.a.qadd.enable_quant)


QSubtract = define("QSubtract", Opr, operator.sub, torch.subtract, torch.sub, "sub")
QMul = define("QMul", Opr, operator.mul, torch.mul, torch.multiply, "mul")
QDivide = define("QDivide", Opr, operator.truediv, torch.div, torch.divide, "div")
QFloorDiv = define("QFloorDiv", Opr, operator.floordiv, torch.floor_divide)
