"""How each tensor is stored: small ones in float32, float matrices as asked, packed layers with their own codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebit.llm.gguf.items import Item
from sparsebit.llm.gguf.packing import EXACT, REQUANTIZED, RUN, Fit, fit, pack
from sparsebit.numeric.quantized_weight import QuantizedWeight

KINDS = {
    "auto": "F16",
    "f32": "F32",
    "f16": "F16",
    "bf16": "BF16",
    "q8_0": "Q8_0",
    "q4_0": "Q4_0",
    "q4_1": "Q4_1",
}
FLOAT32 = ("position_embd.", "ffn_gate_inp", "ssm_conv1d", "rope_")  # read as float32 by llama.cpp
ENDS = ("token_embd.", "output.")  # 4 bits hurt most here
LARGEST = 65504.0  # of float16


@dataclass(frozen=True)
class Stored:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    item: Item
    packed: bool = False
    change: str = EXACT
    why: str = ""

    def data(self, gguf: Any) -> np.ndarray:
        """The bytes, or numbers, as they lie in the file."""
        parts = [self._convert(gguf, value) for value in self.item.read()]
        return parts[0] if len(self.shape) < 3 else np.stack(parts)

    def _convert(self, gguf: Any, value: Tensor | QuantizedWeight) -> np.ndarray:
        if isinstance(value, QuantizedWeight):
            if self.kind.startswith("Q") and self.change != REQUANTIZED:
                return pack(value, self.name)
            value = value.dequantize()
        value = value.detach().cpu()
        if self.kind in ("F32", "F16"):
            return value.to(torch.float32 if self.kind == "F32" else torch.float16).contiguous().numpy()
        if self.kind == "BF16":
            return value.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
        kind = gguf.GGMLQuantizationType[self.kind]
        return np.asarray(gguf.quantize(value.float().contiguous().numpy(), kind))


def plan(name: str, item: Item, outtype: str) -> Stored:
    if item.packed and not any(part in name for part in FLOAT32):
        found = _fit_all(item)
        if found.change == REQUANTIZED and found.kind != "F16" and KINDS[outtype].startswith("Q"):
            found = Fit(KINDS[outtype], REQUANTIZED, found.why)
        return Stored(name, item.shape, found.kind, item, True, found.change, found.why)
    return Stored(name, item.shape, _float_kind(name, item, outtype), item)


def _fit_all(item: Item) -> Fit:
    """One kind for all experts of a stack."""
    fits = []
    for value in item.read():
        assert isinstance(value, QuantizedWeight)
        fits.append(fit(value))
    worst = next((f for f in fits if f.change == REQUANTIZED), None)
    if worst is not None:
        return worst
    if len({f.kind for f in fits}) > 1:
        return Fit("Q8_0", REQUANTIZED, "its experts have different widths")
    return next((f for f in fits if f.change != EXACT), fits[0])


def _float_kind(name: str, item: Item, outtype: str) -> str:
    if len(item.shape) < 2 or any(part in name for part in FLOAT32):
        return "F32"
    kind = KINDS[outtype]
    if outtype == "auto" and item.dtype == torch.bfloat16:
        kind = "BF16"
    if kind.startswith("Q") and item.shape[-1] % RUN:
        kind = "F16"
    if kind in ("Q4_0", "Q4_1") and name.startswith(ENDS):
        kind = "Q8_0"
    if kind == "F16" and item.dtype != torch.float16 and _largest(item) > LARGEST:
        kind = "F32"
    return kind


def _largest(item: Item) -> float:
    return max(float(value.abs().max()) for value in item.read() if isinstance(value, Tensor))
