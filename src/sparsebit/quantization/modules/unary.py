"""Ops with one input that return its values: dropout, copies, casts, and questions about a tensor."""

from __future__ import annotations

from torch import nn

# Legacy: the original has these names in this file
from sparsebit.quantization.modules.activations import QSoftmax as QSoftmax
from sparsebit.quantization.modules.base import Mover, Value, define, spelled
from sparsebit.quantization.modules.base import QIdentity as QIdentity
from sparsebit.quantization.modules.float_ops.index import Where as Where

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
