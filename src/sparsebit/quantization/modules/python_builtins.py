"""Python's own operators and functions on values of the graph; math is of numbers."""

from __future__ import annotations

import math
import operator

from sparsebit.quantization.modules.base import Opr, Value, define, spelled

QGetAttr = define("QGetAttr", Opr, getattr)
QGetItem = define("QGetItem", Opr, operator.getitem)
QEqual = define("QEqual", Opr, *spelled("eq"))
Number = define(
    "Number",
    Value,
    *(function for function in vars(math).values() if callable(function)),
    *(abs, round, len, int, float, bool, min, max, sum),
    *spelled("sym_int sym_float sym_max sym_min sym_not sym_sum sym_ite is_ is_not contains"),
)
