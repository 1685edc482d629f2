"""QIdentity carries a quantizer for a value in the graph; the other ops here hand their input on."""

from __future__ import annotations

from typing import Any

from torch import nn

from sparsebit.quantization.modules.activations import (
    QSoftmax as QSoftmax,
)  # Legacy: the original has it in this file
from sparsebit.quantization.modules.base import Mover, QuantOpr, Value, define, register_qmodule, spelled
from sparsebit.quantization.modules.float_ops.index import (
    Where as Where,  # Legacy: the original has it in this file
)


@register_qmodule(sources=[nn.Identity])
class QIdentity(QuantOpr):
    """The quantizer of one input of a multi-input op, or an nn.Identity the user marked with `.remove = False`."""

    moves_values = True

    def forward(self, x_in: Any) -> Any:
        return self.quantized_input(x_in)


Dropout = define(
    "Dropout",
    Mover,
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *spelled("dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout"),
)
Clone = define("Clone", Mover, *spelled("clone"))
Contiguous = define("Contiguous", Mover, *spelled("contiguous"))
Detach = define("Detach", Mover, *spelled("detach"))
Cast = define(
    "Cast",
    Mover,
    *spelled(
        "to type type_as float half double bfloat16 int long short char byte bool cfloat cdouble cpu cuda"
    ),
    doc="Another dtype or device.",
)
Query = define(
    "Query",
    Value,
    *spelled(
        "item tolist is_contiguous is_floating_point is_complex is_signed is_same_size get_device is_inference"
    ),
    doc="What a tensor is, as a Python value.",
)
