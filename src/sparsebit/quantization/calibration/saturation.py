"""Ranges in front of activations that saturate: far below zero, x * sigmoid(x) is zero, whatever x is.

So codes for values down there are wasted. The lower end of the range moves up to where the activation is within a
quarter of a step of its limit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from sparsebit.graph.ops import called_module, module_of
from sparsebit.quantization.converters.float_forms import gate_behind
from sparsebit.quantization.converters.output_grids import OutputGrids
from sparsebit.quantization.layers import is_active
from sparsebit.quantization.modules.activations import QGELU, QHardSwish, QMish, QSiLU
from sparsebit.quantization.modules.conv import QConv2d
from sparsebit.quantization.modules.math import QMul
from sparsebit.quantization.modules.unary import QIdentity
from sparsebit.quantization.quantizers import Quantizer

TAIL: dict[type, Callable[[Tensor], Tensor]] = {
    QSiLU: F.silu,
    QHardSwish: F.hardswish,
    QMish: F.mish,
    QGELU: F.gelu,
}
PART_OF_STEP = 0.25
ENDS = torch.arange(2.0, 16.0, 0.25)  # how far below zero the range may end


def trim_ranges(gm: fx.GraphModule) -> int:
    """Give the inputs of such activations grids that end where they saturate; returns how many."""
    changed = 0
    grids = OutputGrids(gm, all_readers=True)
    for node in gm.graph.nodes:
        conv = called_module(node, gm)
        tail = _tail_behind(node, gm) if isinstance(conv, QConv2d) else None
        readers = grids.readers(node) if tail is not None else None
        if tail is None or not readers:
            continue
        inputs = list(dict.fromkeys(reader.quantizer for reader in readers))
        if all(q in gate_behind(node, gm) and _is_plain(q) for q in inputs):
            changed += _trim(inputs, tail)
    return changed


def _tail_behind(node: fx.Node, gm: fx.GraphModule) -> Callable[[Tensor], Tensor] | None:
    """The one activation that reads a convolution, whole or as x * gate(x)."""
    kinds = set()
    for user in node.users:
        kinds.add(type(module_of(user, gm)) if user.op == "call_module" else None)
    if len(kinds) == 1:
        return TAIL.get(next(iter(kinds)))  # type: ignore[arg-type]
    names = {kind.__name__ for kind in kinds if kind is not None}
    identities = [u for u in node.users if u.op == "call_module" and isinstance(module_of(u, gm), QIdentity)]
    products = set()
    for identity in identities:
        for user in identity.users:
            products.add(user)
    is_gated = len(products) == 1 and all(isinstance(module_of(p, gm), QMul) for p in products)
    gate = {"QSigmoid": F.silu, "QHardSigmoid": F.hardswish}
    found = [gate[name] for name in names if name in gate]
    if is_gated and len(kinds) == 2 and len(found) == 1 and None not in kinds:
        return found[0]
    return None


def _is_plain(quantizer: Quantizer) -> bool:
    plain = is_active(quantizer) and quantizer.TYPE == "uniform" and quantizer.known_range is None
    return plain and not quantizer.is_perchannel and not quantizer.is_symmetric


@torch.no_grad()
def _trim(inputs: list[Quantizer], tail: Callable[[Tensor], Tensor]) -> int:
    low = min(float(q.observer.min_val.min()) for q in inputs)
    high = max(float(q.observer.max_val.max()) for q in inputs)
    top = max(high, 0.0)
    steps = (top + ENDS) / (2 ** inputs[0].bit - 1)
    enough = tail(-ENDS).abs() <= PART_OF_STEP * steps
    if bool(enough.any()):
        end = float(ENDS[enough][0])
    else:
        end = float(ENDS[-1])
    if low >= -end:
        return 0
    for quantizer in inputs:
        quantizer.observer.min_val = quantizer.observer.min_val.clamp(min=-end)
        quantizer.calc_qparams_with_minmax(quantizer.observer.min_val, quantizer.observer.max_val)
    return 1
