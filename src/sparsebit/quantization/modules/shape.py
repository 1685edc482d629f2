"""Shape ops move values without changing them: no quantizer."""

from __future__ import annotations

import torch
from torch import nn

from sparsebit.quantization.modules.base import Opr, define

Flatten = define("Flatten", Opr, nn.Flatten, torch.flatten, "flatten")
Size = define("Size", Opr, "size")
Reshape = define("Reshape", Opr, torch.reshape, "reshape", "view")
Concat = define("Concat", Opr, torch.cat, torch.concat)
Expand = define("Expand", Opr, "expand")
Expand_as = define("Expand_as", Opr, "expand_as")
Transpose = define("Transpose", Opr, torch.transpose, "transpose")
Permute = define("Permute", Opr, torch.permute, "permute")
Split = define("Split", Opr, torch.split, "split")
