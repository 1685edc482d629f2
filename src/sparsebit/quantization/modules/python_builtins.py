"""Python's own operators on values of the graph."""

from __future__ import annotations

import operator

from sparsebit.quantization.modules.base import Opr, define

QGetAttr = define("QGetAttr", Opr, getattr)
QGetItem = define("QGetItem", Opr, operator.getitem)
QEqual = define("QEqual", Opr, operator.eq)
