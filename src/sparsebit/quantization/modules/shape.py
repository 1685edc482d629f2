"""Shape ops move values without changing them: no quantizer."""

from __future__ import annotations

import torch
from torch import nn

from sparsebit.quantization.modules.base import Opr, Value, define, spelled

Flatten = define("Flatten", Opr, nn.Flatten, *spelled("flatten ravel"))
Unflatten = define("Unflatten", Opr, nn.Unflatten, *spelled("unflatten"))
Size = define(
    "Size", Value, *spelled("size dim ndimension numel nelement stride element_size storage_offset")
)
Reshape = define("Reshape", Opr, *spelled("reshape view view_as reshape_as"))
Concat = define("Concat", Opr, torch.cat, torch.concat, torch.concatenate)
Stack = define("Stack", Opr, *spelled("stack hstack vstack dstack column_stack row_stack block_diag"))
Expand = define("Expand", Opr, *spelled("expand broadcast_to broadcast_tensors"))
Expand_as = define("Expand_as", Opr, *spelled("expand_as"))
Transpose = define("Transpose", Opr, *spelled("transpose swapaxes swapdims t adjoint"))
Permute = define("Permute", Opr, *spelled("permute movedim moveaxis"))
Squeeze = define("Squeeze", Opr, *spelled("squeeze unsqueeze atleast_1d atleast_2d atleast_3d"))
Split = define(
    "Split",
    Opr,
    *spelled(
        "split split_with_sizes tensor_split hsplit vsplit dsplit chunk unbind unsafe_chunk unsafe_split"
    ),
)
Repeat = define("Repeat", Opr, *spelled("repeat repeat_interleave tile"))
Move = define(
    "Move",
    Opr,
    *spelled("flip fliplr flipud roll rot90 tril triu diag diagonal diag_embed diagflat as_strided"),
    *spelled("meshgrid cartesian_prod combinations sum_to_size"),
    doc="Values change their place.",
)
