"""Multiplications of aten ops: torch's formulas, and formulas for ops that torch.utils.flop_counter does not
know."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

aten = torch.ops.aten
Part = tuple[int, tuple[Any, ...]]  # MACs, and the operands that are multiplied


def parts(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Part]:
    """MACs of one aten op with the operands they multiply; [] for ops that multiply no matrices."""
    if packet in FORMULAS:
        return FORMULAS[packet](*args)
    if packet not in flop_registry:
        return []
    macs = int(flop_registry[packet](*args, **kwargs, out_val=out)) // 2
    if "attention" in packet.__name__:
        return [(macs // 2, args[:2]), (macs - macs // 2, (None, args[2]))]
    # the addend comes first
    first = 0
    if packet in (aten.addmm, aten.baddbmm):
        first = 1
    return [(macs, args[first : first + 2])]


class MacCounter(FlopCounterMode):
    """`with MacCounter() as counter: model(x)`, then `counter.macs`."""

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping={op: _flops(f) for op, f in FORMULAS.items()})

    @property
    def macs(self) -> int:
        return int(self.get_total_flops()) // 2


def _flops(formula: Callable[..., list[Part]]) -> Callable[..., int]:
    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return 2 * sum(macs for macs, _ in formula(*args))

    count._get_raw = True  # type: ignore[attr-defined]  # tensors, not their shapes
    return count


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Part]:
    """Q K', then P V; None is P, a value inside the fused op."""
    batch = math.prod(q.shape[:-2]) * q.shape[-2] * k.shape[-2]
    return [(batch * q.shape[-1], (q, k)), (batch * v.shape[-1], (None, v))]


def _lstm(x: Tensor, w_ih: Tensor, w_hh: Tensor, *rest: Any) -> list[Part]:
    steps = x.numel() // x.shape[-1]
    return [(steps * w_ih.numel(), (x, w_ih)), (steps * w_hh.numel(), (None, w_hh))]


FORMULAS: dict[Any, Callable[..., list[Part]]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten.mkldnn_rnn_layer: _lstm,
    aten._grouped_mm: lambda a, b, *rest: [(a.numel() * b.shape[-1], (a, b))],  # tokens by experts
    aten.mv: lambda m, v: [(m.numel(), (m, v))],
    aten.addmv: lambda x, m, v, **_: [(m.numel(), (m, v))],
    aten.dot: lambda a, b: [(a.numel(), (a, b))],
    aten.addbmm: lambda x, a, b, **_: [(a.numel() * b.shape[-1], (a, b))],
    aten._trilinear: lambda a, w, b, *_: [(a.shape[0] * w.numel(), (a, w, b))],
}
