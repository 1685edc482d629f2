"""Second moments of what enters each Linear of a block, streamed: batches are added up and forgotten.

Layers that read the same tensor (q, k and v) share one matrix. With a float block beside the quantized one, the
difference of their inputs is correlated too, see numeric/solvers/gptq.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.llm.models.experts import is_routed
from sparsebit.llm.walk.lane import Lane
from sparsebit.numeric.solvers.gptq import Statistics
from sparsebit.numeric.solvers.smoothquant import PeakStatistics

STRIP = 384  # rows of a Hessian that are made at once: wide enough for a fast product


def sharing(lane: Lane, names: Iterable[str]) -> list[list[str]]:
    """Layers that read one tensor, in the order in which they run; layers that did not run come last, alone."""
    names = list(names)
    seen: list[tuple[Tensor, list[str]]] = []
    for name, x in lane.survey(0, names):
        readers = next((readers for tensor, readers in seen if tensor is x), None)
        if readers is None:
            seen.append((x, [name]))
        else:
            readers.append(name)
    groups = [list(dict.fromkeys(readers)) for _, readers in seen]
    flat = [name for group in groups for name in group]
    if len(set(flat)) < len(flat):  # a layer that runs twice in one forward shares no statistics
        groups = [[name] for name in dict.fromkeys(flat)]
    return groups + [[name] for name in names if name not in flat]


@torch.no_grad()
def collect(
    lane: Lane, groups: list[list[str]], float_lane: Lane | None = None, peaks: bool = False
) -> dict[str, Statistics]:
    """The statistics of each layer in `groups`, over all batches; with `peaks` the largest inputs too."""
    heads = {group[0]: group for group in groups}
    sums: dict[str, Tensor] = {}
    crosses: dict[str, Tensor] = {}
    aims: dict[str, Tensor] = {}
    largest: dict[str, Tensor] = {}
    tokens = dict.fromkeys(heads, 0)
    right: dict[str, list[Tensor]] = {}
    # the float model may send it other tokens
    routed = {name for name in heads if is_routed(lane.block, name)}

    if float_lane:
        narrow = {name for name in heads if _narrow(lane.block, heads[name])} - routed
    else:
        narrow = set()

    def keep(name: str, x: Tensor) -> None:
        if name in narrow and float_lane is not None:  # x is what the layer gives
            bias: Any = float_lane.block.get_submodule(name).bias
            # Falcon adds to it, in place
            if bias is None:
                x = x.clone()
            else:
                x = x - bias
        right.setdefault(name, []).append(_rows(x))

    def add(name: str, x: Tensor) -> None:
        rows = _rows(x)
        tokens[name] += len(rows)
        _add_square(sums, name, rows)
        if peaks and len(rows):
            top = rows.abs().amax(0)
            largest[name] = torch.maximum(largest.get(name, top), top)
        if right.get(name) and name not in routed:
            other = right[name].pop(0)
            if len(other) != len(rows):  # other tokens: a difference has no meaning
                narrow.discard(name)
                aims.pop(name, None)
            elif name in narrow:
                _add_product(aims, name, other, rows)
            elif other.shape == rows.shape:
                _add_product(crosses, name, other - rows, rows)

    for i in range(len(lane)):
        if float_lane is not None:
            right.clear()
            float_lane.watch(i, heads, keep, narrow)
        lane.watch(i, heads, add)
    found = {}
    for head in heads:
        if head in sums:
            found[head] = PeakStatistics(
                _whole(sums[head]), crosses.get(head), tokens[head], largest.get(head), aim=aims.get(head)
            )
    return {name: found[head] for head, group in heads.items() if head in found for name in group}


def _narrow(block: nn.Module, group: list[str]) -> bool:
    """True if a layer has fewer outputs than inputs, and no other layer shares its input."""
    layer: Any = block.get_submodule(group[0])
    return len(group) == 1 and layer.out_features < layer.in_features


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).float()


def _add_square(sums: dict[str, Tensor], name: str, x: Tensor) -> None:
    """x^T x, in strips from the diagonal to the right: the part below the diagonal is the same."""
    if name not in sums:
        sums[name] = x.new_zeros(x.shape[1], x.shape[1])
    for start in range(0, x.shape[1], STRIP):
        strip = slice(start, start + STRIP)
        sums[name][strip, start:].addmm_(x[:, strip].T, x[:, start:])


def _whole(upper: Tensor) -> Tensor:
    return upper.triu().add_(upper.triu(1).T)


def _add_product(sums: dict[str, Tensor], name: str, a: Tensor, b: Tensor) -> None:
    if name in sums:
        sums[name].addmm_(a.T, b)
    else:
        sums[name] = a.T @ b
