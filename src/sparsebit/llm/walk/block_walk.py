"""Decoder blocks one after the other: measure, solve, store, and hand the quantized block's outputs on.

Only one block and the activations between two blocks are in memory. A block that is already stored is read instead of
solved, with the same outputs, so a run that was killed ends in the same bytes.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import SparsebitError
from sparsebit.llm.checkpoints.store import Store
from sparsebit.llm.methods import Solved, options_of
from sparsebit.llm.models.blocks import linears_of
from sparsebit.llm.models.experts import is_routed
from sparsebit.llm.models.sources import InMemory
from sparsebit.llm.transforms.smooth import Feeders, fold
from sparsebit.llm.walk.capture import Captured
from sparsebit.llm.walk.job import Job
from sparsebit.llm.walk.lane import Lane
from sparsebit.llm.walk.relay import Ends, Relay, start_of
from sparsebit.llm.walk.solve import set_weight, solve
from sparsebit.llm.walk.spill import give_back
from sparsebit.llm.walk.statistics import collect, sharing
from sparsebit.llm.walk.stored import restore, stored_tensors
from sparsebit.numeric.solvers.gptq import Statistics
from sparsebit.numeric.solvers.smoothquant import round_tokens

log = logging.getLogger("sparsebit")
TRIM = 8  # freed memory is returned after this many blocks: to get it again costs time


def walk(
    source: InMemory, relay: Relay | None, job: Job, store: Store, ends: Ends | None = None
) -> Iterator[int]:
    """Yields each block's number when it is stored; tower after tower, in the order of running.

    ends  receives the outputs of the towers.
    """
    if relay is None:
        for t, tower in enumerate(source.layout.towers):
            nothing = Captured(len(tower))
            yield from _walk_tower(source, _Streams(t, nothing, nothing, 0, False), job, store)
        return
    twin = job.match_float and job.method.twin and relay.fitted > 0
    floats = relay.towers(copies=True, start=0 if twin else relay.fitted)
    first = next(floats)  # a copy, before the other one changes their shared tensors
    for (t, captured), (_, apart) in zip(relay.towers(), itertools.chain([first], floats)):
        yield from _walk_tower(source, _Streams(t, captured, apart, relay.fitted, twin), job, store)
        if ends is not None:
            ends.add(t, captured, apart)


@dataclass(frozen=True)
class _Streams:
    """The hidden states of one tower. The first `fitted` batches are used for fitting, the others only for
    measuring."""

    tower: int
    captured: Captured
    floats: Captured  # in the float model: all batches where there is a twin, else those that are measured on
    fitted: int
    twin: bool  # solvers want to know what the float model would have given


@torch.no_grad()
def _walk_tower(source: InMemory, flow: _Streams, job: Job, store: Store) -> Iterator[int]:
    captured = flow.captured
    floats = flow.floats
    hidden = captured.hidden
    feeders = Feeders()
    start = start_of(source, source.layout.towers[flow.tower])
    for i in range(start, start + len(captured.calls)):
        block = source.block(i)
        prefix = source.layout.prefix(i)
        float_block = copy.deepcopy(block) if flow.twin else None
        calls = captured.calls[i - start]
        float_calls = floats.calls[i - start]
        names = list(linears_of(block))
        lane = Lane(block, calls[: flow.fitted], hidden, names)
        twin = None
        if float_block is not None:
            twin = Lane(float_block, float_calls[: flow.fitted], floats.hidden, names)
        for b in range(len(twin or ()), len(float_calls)):  # before its weights change
            floats.hidden[b] = float_calls[b].run(block, floats.hidden[b])
        if store.has(i):
            restore(source, i, block, store.read(i), job)
        else:
            solved, about = _solve_block(_Lanes(lane, twin, feeders), prefix, job)
            store.write(i, stored_tensors(source, i, block, solved, job.format), about)
        for b in range(flow.fitted):
            hidden[b] = _checked(lane.output(b, last=True), prefix)
            if twin is not None:
                floats.hidden[b] = twin.output(b, last=True)
        with _as_loaded(block, prefix, job):
            for b in range(flow.fitted, len(calls)):
                hidden[b] = _checked(calls[b].run(block, hidden[b]), prefix)
        captured.passed(i - start)
        floats.passed(i - start)
        alive = weakref.ref(block)
        del block, float_block, lane, twin
        if alive() is not None:  # modules that know their parents are cycles
            gc.collect()
        if i % TRIM == TRIM - 1:
            give_back()
        yield i


@contextlib.contextmanager
def _as_loaded(block: nn.Module, prefix: str, job: Job) -> Iterator[None]:
    """The block computes as it will after loading: it may also round the inputs of its layers."""
    layers = [m for n, m in linears_of(block).items() if prefix + n in job.specs and job.format.activations]
    hooks = [m.register_forward_pre_hook(lambda _, args: (round_tokens(args[0]), *args[1:])) for m in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class _Lanes:
    """A block that is being quantized on what quantized blocks before it give, and its float twin."""

    lane: Lane
    twin: Lane | None
    feeders: Feeders

    @property
    def block(self) -> nn.Module:
        return self.lane.block

    def collect(self, groups: list[list[str]], peaks: bool = False) -> dict[str, Statistics]:
        if self.twin is not None:  # its weights stay
            self.twin.settle(name for group in groups for name in group)
        return collect(self.lane, groups, self.twin, peaks)


def _solve_block(lanes: _Lanes, prefix: str, job: Job) -> tuple[dict[str, Solved], dict[str, dict[str, Any]]]:
    """Stage after stage (layers that read one tensor); without true_sequential all layers are one stage."""
    linears = {n: m for n, m in linears_of(lanes.block).items() if prefix + n in job.specs}
    measured = job.method.uses_data and len(lanes.lane) > 0
    groups = [list(linears)]
    if measured:
        groups = sharing(lanes.twin or lanes.lane.apart(), linears)
    if job.true_sequential:
        stages = _stages(lanes.block, groups)
    else:
        stages = [groups]
    solved: dict[str, Solved] = {}
    about: dict[str, dict[str, Any]] = {}
    folded: dict[str, dict[str, Any]] = {}
    if measured and job.method.scales is not None:
        folded = _fold_scales(lanes, groups, prefix, job, job.method.scales)
    for stage in stages:
        names = [name for group in stage for name in group]
        statistics = lanes.collect(stage) if measured else {}
        if measured:
            names = [name for name in names if name in statistics or not _stays(name, prefix, job)]
        for name in names:
            spec = job.specs[prefix + name]
            seen = statistics.get(name)
            solved[name], told = solve(linears[name], seen, spec, job, prefix + name)
            about[prefix + name] = {**told, **folded.get(name, {})}
        for name in names:
            set_weight(linears[name], solved[name])
        lanes.lane.settle(names)
        del statistics
    return solved, about


def _stays(name: str, prefix: str, job: Job) -> bool:
    """True if a layer without input stays float. Members of lists do not: they are experts that wait for other tokens.

    The block reads its weight without calling it (Mamba's dt_proj), or does not use it.
    """
    if any(part.isdigit() for part in name.split(".")):
        return False
    log.warning("%s%s: the block never calls this layer, so it stays float", prefix, name)
    del job.specs[prefix + name]
    return True


def _stages(block: nn.Module, groups: list[list[str]]) -> list[list[list[str]]]:
    """One after the other, but experts of one stack together: they do not feed each other."""
    stages: dict[str, list[list[str]]] = {}
    for group in groups:
        owner, _, leaf = group[0].rpartition(".")
        if is_routed(block, group[0]):
            stack = f"{owner.rpartition('.')[0]}.*.{leaf}"
        else:
            stack = group[0]
        stages.setdefault(stack, []).append(group)
    return list(stages.values())


def _fold_scales(
    lanes: _Lanes, groups: list[list[str]], prefix: str, job: Job, choose: Callable[..., Tensor]
) -> dict[str, dict[str, Any]]:
    """Scales that the method chooses, where the block has a place for them; returns the names of the layers that took
    them."""
    found = lanes.feeders.find(lanes.block, groups, lanes.lane.calls[0], lanes.lane.hidden[0])
    scaled = [(group, feeder) for group, feeder in zip(groups, found) if feeder is not None]
    statistics = {}
    if scaled:
        statistics = lanes.collect([group for group, _ in scaled], peaks=True)
    about = {}
    for group, feeder in scaled:
        weights = [lanes.block.get_submodule(name).weight for name in group]
        specs = [job.specs[prefix + name] for name in group]
        options = options_of(choose, job.options)
        scales = choose(
            weights, statistics[group[0]], specs, feeder.rows, scale_dtype=job.scale_dtype, **options
        )
        fold(lanes.block, feeder, group, scales)
        about.update({name: {"scales_in": prefix + feeder.name} for name in group})
    lanes.lane.forget()
    return about


def _checked(hidden: Tensor, prefix: str) -> Tensor:
    if not bool(torch.isfinite(hidden).all()):
        raise SparsebitError(
            f"{prefix[:-1]}: its output has NaN or Inf; try another dtype or calibration data"
        )
    return hidden
