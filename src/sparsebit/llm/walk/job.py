"""Job: the work on every block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sparsebit.llm.formats import Format
from sparsebit.llm.methods import Method
from sparsebit.numeric.spec import QuantSpec


@dataclass(frozen=True)
class Job:
    """The work on every block. `specs` are the grids of the layers that are quantized, by their full names."""

    name: str  # of the method
    method: Method
    specs: dict[str, QuantSpec]
    options: dict[str, Any]
    format: Format
    scale_dtype: torch.dtype
    true_sequential: bool = True
    match_float: bool = False
