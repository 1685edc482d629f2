"""QIdentity carries a quantizer for a value in the graph; the other ops here hand their input on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sparsebit.quantization.modules.base import Opr, QuantOpr, define, register_qmodule


@register_qmodule(sources=[nn.Identity])
class QIdentity(QuantOpr):
    """The quantizer of one input of a multi-input op, or an nn.Identity the user marked with `.remove = False`."""

    def forward(self, x_in: Any) -> Any:
        return self.quantized_input(x_in)


Dropout = define("Dropout", Opr, nn.Dropout, F.dropout)
Clone = define("Clone", Opr, torch.clone, "clone")
Contiguous = define("Contiguous", Opr, "contiguous")
Detach = define("Detach", Opr, torch.detach, "detach")
Where = define("Where", Opr, torch.where, "where")
