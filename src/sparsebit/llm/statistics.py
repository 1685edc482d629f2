"""Second moments of what enters each Linear of a block, streamed: batches are added up and forgotten.

Layers that read the same tensor (q, k and v) share one matrix. With a float block beside the quantized one, the
difference of their inputs is correlated too, see numeric/gptq.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sparsebit.llm.capture import Call
from sparsebit.llm.experts import is_routed
from sparsebit.numeric.gptq import Statistics
from sparsebit.numeric.smoothquant import PeakStatistics


class _Enough(Exception):
    """Everything that was asked for has been seen in this forward."""


def sharing(block: nn.Module, names: Iterable[str], call: Call, hidden: Tensor) -> list[list[str]]:
    """Layers that read one tensor, in the order in which they run; layers that did not run come last, alone."""
    seen: list[tuple[Tensor, list[str]]] = []  # holds the tensors, so that no address is used twice

    def note(name: str, x: Tensor) -> None:
        for tensor, readers in seen:
            if tensor is x:
                readers.append(name)
                return
        seen.append((x, [name]))

    _forward(block, {name: [name] for name in names}, call, hidden, note, early=False)
    groups = [list(dict.fromkeys(readers)) for _, readers in seen]
    flat = [name for group in groups for name in group]
    if len(set(flat)) < len(flat):  # a layer that runs twice in one forward shares with nobody
        groups = [[name] for name in dict.fromkeys(flat)]
    return groups + [[name] for name in names if name not in flat]


@torch.no_grad()
def collect(
    block: nn.Module,
    groups: list[list[str]],
    calls: list[Call],
    hidden: list[Tensor],
    float_block: nn.Module | None = None,
    float_hidden: list[Tensor] | None = None,
    peaks: bool = False,
) -> dict[str, Statistics]:
    """The statistics of each layer in `groups`, over all batches; with `peaks` the largest inputs too."""
    heads = {group[0]: group for group in groups}
    sums: dict[str, Tensor] = {}
    crosses: dict[str, Tensor] = {}
    largest: dict[str, Tensor] = {}
    tokens = dict.fromkeys(heads, 0)
    right: dict[str, list[Tensor]] = {}
    routed = {name for name in heads if is_routed(block, name)}  # the float model may send it other tokens

    def keep(name: str, x: Tensor) -> None:
        right.setdefault(name, []).append(_rows(x))

    def add(name: str, x: Tensor) -> None:
        rows = _rows(x)
        tokens[name] += len(rows)
        _accumulate(sums, name, rows, rows)
        if peaks and len(rows):
            top = rows.abs().amax(0)
            largest[name] = torch.maximum(largest.get(name, top), top)
        if float_block is not None and right.get(name) and name not in routed:
            other = right[name].pop(0)
            if (
                other.shape == rows.shape
            ):  # experts may get other tokens: then there is no difference to speak of
                _accumulate(crosses, name, other - rows, rows)

    for i, call in enumerate(calls):
        if float_block is not None and float_hidden is not None:
            right.clear()
            _forward(float_block, heads, call, float_hidden[i], keep)
        _forward(block, heads, call, hidden[i], add)
    return {
        name: PeakStatistics(sums[head], crosses.get(head), tokens[head], largest.get(head))
        for head, group in heads.items()
        if head in sums
        for name in group
    }


def _forward(block, heads, call, hidden, note, early=True) -> None:
    """One forward of `block`; note(name, input) for each layer in `heads`; ends when all have run."""
    left = set(heads)

    def hook(name: str):
        def before(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            note(name, args[0] if args else next(iter(kwargs.values())))
            left.discard(name)
            if early and not left:
                raise _Enough

        return before

    handles = [
        block.get_submodule(name).register_forward_pre_hook(hook(name), with_kwargs=True) for name in heads
    ]
    try:
        call.run(block, hidden)
    except _Enough:
        pass
    finally:
        for handle in handles:
            handle.remove()


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).float()


def _accumulate(sums: dict[str, Tensor], name: str, a: Tensor, b: Tensor) -> None:
    if name in sums:
        sums[name].addmm_(a.T, b)
    else:
        sums[name] = a.T @ b
