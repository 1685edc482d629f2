"""Which range of OBSERVER.TYPE: auto each quantizer takes.

A few samples run through the float model. Every layer that reads a quantizer runs once for each candidate, and its
output is compared with the float one. Quantizers of one grid decide together. Then the outputs of the whole model are
compared: for the first candidate everywhere, for the best of those that clip little, and for the best of all. The best
of the three stays.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from sparsebit.graph.run.calls import Call
from sparsebit.quantization.calibration.output_noise import decibels, noise, outputs
from sparsebit.quantization.modules import QuantOpr, quant_mode
from sparsebit.quantization.observers.auto import CANDIDATES, AutoObserver
from sparsebit.quantization.observers.ranks import world_size
from sparsebit.quantization.quantizers import Mode, Quantizer

log = logging.getLogger("sparsebit")
Range = tuple[Tensor, Tensor]
FIRST = CANDIDATES[0]
PROPOSALS = ((FIRST,), (FIRST, "minmax", "moving_average"), CANDIDATES)
CHOICE = "ranges"  # in the meta of the graph: how many quantizers took which observer, for the report


class Grids:
    """Quantizers that share a grid, the layers that read it, and the candidates for its range."""

    def __init__(self, members: list[Quantizer], layers: list[QuantOpr]):
        self.members = members
        self.layers = layers
        self.candidates = _common_ranges(members)
        self.errors: dict[str, float] = defaultdict(float)

    def take(self, name: str) -> None:
        low, high = self.candidates[name]
        for member in self.members:
            member.observer.min_val = low.clone()
            member.observer.max_val = high.clone()
        self.members[0].share_grid(self.members)

    def best(self, among: Sequence[str]) -> str:
        known = [name for name in self.candidates if name in among]
        return min(known, key=lambda name: self.errors[name])


@torch.no_grad()
def choose_ranges(gm: fx.GraphModule, calls: Sequence[Call]) -> int:
    """Give the quantizers with several candidates the best one; returns how many changed."""
    gm.meta.pop(CHOICE, None)
    grids = [g for g in _grids(gm) if len(g.candidates) > 1]
    if not grids or not calls:
        return 0
    if world_size() > 1:  # each process would choose by its own samples
        log.warning(
            "OBSERVER.TYPE auto: several processes calibrate together, so all ranges are those of %s", FIRST
        )
        return 0
    with _watched(grids):
        for call in calls:
            call.run(gm)
    wanted = [outputs(gm, call) for call in calls]
    found: list[tuple[float, dict[Grids, str]]] = []
    with quant_mode(gm, a=True):
        for among in PROPOSALS:
            chosen = {g: g.best(among) for g in grids}
            for g, name in chosen.items():
                g.take(name)
            found.append((noise(wanted, [outputs(gm, call) for call in calls]), chosen))
    least, chosen = min(found, key=lambda pair: pair[0])
    if not least:  # outputs of other shapes: nothing tells which is better
        least, chosen = found[0]
    for g, name in chosen.items():
        g.take(name)
    others = Counter(name for name in chosen.values() if name != FIRST)
    if others:
        gained = decibels(least) - decibels(found[0][0])
        counts = ", ".join(f"{count} {name}" for name, count in others.most_common())
        gm.meta[CHOICE] = (
            f"OBSERVER.TYPE auto: {counts} of {len(grids)} ranges: {gained:+.1f} dB on the calibration data"
        )
        log.info("%s", gm.meta[CHOICE])
    return others.total()


def _grids(gm: fx.GraphModule) -> Iterator[Grids]:
    owners: dict[Quantizer, QuantOpr] = {}
    for module in gm.modules():
        if isinstance(module, QuantOpr) and _can_choose(module.input_quantizer):
            owners[module.input_quantizer] = module  # type: ignore[index]
    done: set[Quantizer] = set()
    for quantizer in owners:
        if quantizer in done:
            continue
        tied = [q for q in quantizer.tied if q in owners and q.spec == quantizer.spec]
        members = tied if quantizer in tied else [quantizer]
        done.update(members)
        yield Grids(members, [owners[q] for q in members])


def _can_choose(quantizer: Quantizer | None) -> bool:
    if quantizer is None or quantizer.absorbed or quantizer.unused or quantizer.known_range is not None:
        return False
    return isinstance(quantizer.observer, AutoObserver) and quantizer.observer.has_data


def _common_ranges(members: Sequence[Quantizer]) -> dict[str, Range]:
    """Each candidate over the range of all members; those that are equal to an earlier one are left out."""
    each: list[Any] = [member.observer.ranges() for member in members]  # type: ignore[operator]
    found: dict[str, Range] = {}
    for name in CANDIDATES:
        low = torch.stack([ranges[name][0] for ranges in each]).amin(0)
        high = torch.stack([ranges[name][1] for ranges in each]).amax(0)
        if not any(low.equal(known[0]) and high.equal(known[1]) for known in found.values()):
            found[name] = (low, high)
    return found


@contextmanager
def _watched(grids: Sequence[Grids]) -> Iterator[None]:
    """Each layer that runs inside the block adds the errors of all candidates."""
    handles = []
    for g in grids:
        for quantizer, layer in zip(g.members, g.layers):
            handles.append(layer.register_forward_hook(_Compare(g, quantizer), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for g in grids:
            g.take(FIRST)


class _Compare:
    """A hook: the output of a layer with each candidate, beside the float one."""

    def __init__(self, grids: Grids, quantizer: Quantizer):
        self.grids = grids
        self.quantizer = quantizer
        self.busy = False

    def __call__(self, layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self.busy or not isinstance(output, Tensor) or not output.is_floating_point():
            return
        signal = float(output.double().square().sum())
        if not signal:
            return
        self.busy = True
        mode = self.quantizer.mode
        self.quantizer.mode = Mode.QUANT
        try:
            for name in self.grids.candidates:
                self.grids.take(name)
                error = layer.forward(*args, **kwargs) - output
                self.grids.errors[name] += float(error.double().square().sum()) / signal
        finally:
            self.quantizer.mode = mode
            self.busy = False
