"""Python's own operators and functions on values of the graph; math is of numbers."""

from __future__ import annotations

import math
import operator

from torch import fx

from sparsebit.quantization.modules.base import Mover, Value, define, spelled

QGetAttr = define("QGetAttr", Mover, getattr)
QGetItem = define("QGetItem", Mover, operator.getitem)
QEqual = define("QEqual", Mover, *spelled("eq"))
Number = define(
    "Number",
    Value,
    *(function for function in vars(math).values() if callable(function)),
    *(abs, round, len, int, float, bool, min, max, sum),
    *spelled("sym_int sym_float sym_max sym_min sym_not sym_sum sym_ite is_ is_not contains"),
)

TENSORS = ("data", "T", "mT", "H", "mH", "real", "imag", "grad")  # attributes that are tensors themselves


def reads_property(node: fx.Node) -> bool:
    """Is a call of getattr one for a property, such as the device? The values do not matter then."""
    return len(node.args) > 1 and node.args[1] not in TENSORS
