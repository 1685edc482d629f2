"""Shape ops move values without changing them: no quantizer."""

from __future__ import annotations

import torch
from torch import nn

from sparsebit.quantization.modules.base import Mover, Value, define, spelled

Flatten = define("Flatten", Mover, nn.Flatten, *spelled("flatten ravel"))
Unflatten = define("Unflatten", Mover, nn.Unflatten, *spelled("unflatten"))
Size = define(
    "Size", Value, *spelled("size dim ndimension numel nelement stride element_size storage_offset")
)
Reshape = define("Reshape", Mover, *spelled("reshape view view_as reshape_as"))
Concat = define("Concat", Mover, torch.cat, torch.concat, torch.concatenate)
Stack = define("Stack", Mover, *spelled("stack hstack vstack dstack column_stack row_stack block_diag"))
Expand = define("Expand", Mover, *spelled("expand broadcast_to broadcast_tensors"))
Expand_as = define("Expand_as", Mover, *spelled("expand_as"))
Transpose = define("Transpose", Mover, *spelled("transpose swapaxes swapdims t adjoint"))
Permute = define("Permute", Mover, *spelled("permute movedim moveaxis"))
Squeeze = define("Squeeze", Mover, *spelled("squeeze unsqueeze atleast_1d atleast_2d atleast_3d"))
Split = define(
    "Split",
    Mover,
    *spelled(
        "split split_with_sizes tensor_split hsplit vsplit dsplit chunk unbind unsafe_chunk unsafe_split"
    ),
)
Repeat = define("Repeat", Mover, *spelled("repeat repeat_interleave tile"))
Move = define(
    "Move",
    Mover,
    *spelled("flip fliplr flipud roll rot90 tril triu diag diagonal diag_embed diagflat as_strided"),
    *spelled("meshgrid cartesian_prod combinations sum_to_size"),
    doc="Values change their place.",
)
