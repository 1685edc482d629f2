"""Towers one after the other: each is shown what the ones before it give, quantized or not.

Who runs when is seen in one forward. The output of a tower is that of its last block. Some models also read other
blocks (LLaVA takes the last but one of its vision tower). To find them, NaN is put into a block, and the walk looks
where it arrives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import CalibrationError, SparsebitError
from sparsebit.llm.models.blocks import Tower
from sparsebit.llm.models.skeleton import first_line
from sparsebit.llm.models.sources import InMemory
from sparsebit.llm.walk.capture import (
    Captured,
    Replay,
    Wrap,
    call_of,
    capture,
    parameters_of,
    replaced,
    runner,
    wrapper,
)
from sparsebit.llm.walk.data import Data
from sparsebit.utils.progress import tracked


class Relay:
    """The calibration data of one source, tower by tower: batches to fit on, then `held` ones to measure on."""

    def __init__(self, source: InMemory, data: Data, spill: Path | None, progress: bool | None) -> None:
        self.source = source
        self.spill = spill
        self.progress = progress
        towers = source.layout.towers
        self.batches = [*data.fitted, *data.held]
        self.held = len(data.held)
        self.order = list(range(len(towers)))
        self.needed: dict[int, set[int]] = {}
        if len(towers) > 1:
            self.order, self.needed = self._surveyed()
        self.first = self._capture(self.order[0], [])

    def _surveyed(self) -> tuple[list[int], dict[int, set[int]]]:
        try:
            return _Survey(self.source, self.batches[0]).found()
        except (TypeError, ValueError, AttributeError) as error:  # of the model: an input is missing
            if isinstance(error, SparsebitError):
                raise
            first = self.batches[0]
            given = "a tensor of tokens"
            if isinstance(first, Mapping):
                given = ", ".join(first)
            raise CalibrationError(
                f"batches: the model does not run on the first one, which is {given}: {type(error).__name__}: "
                f"{first_line(error)}; pass batches of the model's processor"
            ) from error

    @property
    def fitted(self) -> int:
        """The number of batches that are used for fitting."""
        return len(self.batches) - self.held

    def towers(self, copies: bool = False, start: int = 0) -> Iterator[tuple[int, Captured]]:
        """The number of each tower and what enters it. The caller puts outputs into `hidden`, block by block.

        copies  so that the towers can be gone through again.
        start   only the batches from this one on.
        """
        done: list[Replay] = []
        for t in self.order:
            if t == self.order[0]:
                captured = self.first
            else:
                captured = self._capture(t, done, start)
            if copies:
                captured = captured.copy(start if captured is self.first else 0)
            yield t, captured
            blocks = self.blocks(t)
            done.append(Replay(blocks, {**captured.inner, len(blocks) - 1: captured.hidden}, captured.wraps))

    def blocks(self, tower: int) -> list[nn.Module]:
        found: Any = self.source.model.get_submodule(self.source.layout.towers[tower].path)
        return list(found)

    def _capture(self, t: int, done: list[Replay], start: int = 0) -> Captured:
        tower = self.source.layout.towers[t]
        source = self.source
        used = tracked(self.batches[start:], self.progress, "capturing")
        block = source.sample(start_of(source, tower))
        try:
            found = capture(source.model, self.blocks(t), used, block, self.spill, done)
        except CalibrationError as error:
            raise CalibrationError(f"{tower.path}: {error}") from error
        found.needed = self.needed.get(t, set())
        return found


def start_of(source: InMemory, tower: Tower) -> int:
    """The number of a tower's first block."""
    return next(i for i, (other, _) in enumerate(source.layout.places) if other is tower)


class Ends:
    """The outputs of the towers for the held-back batches, in both models."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.towers: list[tuple[list[Any], Captured, Captured]] = []

    def add(self, tower: int, captured: Captured, floats: Captured) -> None:
        self.towers.append((self.relay.blocks(tower), captured, floats))

    def players(self, which: int, batch: int) -> dict[Any, Callable[..., Any]]:
        """The blocks of all towers, with the outputs of one batch; 0: quantized, 1: float. Counted from the end."""
        forwards: dict[Any, Callable[..., Any]] = {}
        for blocks, *both in self.towers:
            found = both[which]
            outputs = {**found.inner, len(blocks) - 1: found.hidden}
            replay = Replay(blocks, {j: [o[batch]] for j, o in outputs.items()}, [found.wraps[batch]])
            forwards.update({block: replay.player(j, again=True) for j, block in enumerate(blocks)})
        return forwards


class _Enough(Exception):
    """All towers that matter have been reached."""


class _Survey:
    """One batch through the model with blocks that return their inputs."""

    def __init__(self, source: InMemory, batch: Any) -> None:
        self.source = source
        self.batch = batch
        self.towers = source.layout.towers
        lists: list[Any] = [source.model.get_submodule(tower.path) for tower in self.towers]
        self.blocks: list[list[nn.Module]] = [list(blocks) for blocks in lists]
        self.first = [source.sample(start_of(source, tower)) for tower in self.towers]
        self.wraps: dict[int, Wrap] = {}
        self.order: list[int] = []

    @torch.no_grad()
    def found(self) -> tuple[list[int], dict[int, set[int]]]:
        """The towers in the order of running, and the blocks of each whose outputs later towers read."""
        self._run({})
        unseen = [self.towers[t].path for t in range(len(self.towers)) if t not in self.order]
        if unseen:
            raise CalibrationError(
                f"towers: the calibration data does not reach {unseen[0]!r}; pass batches of the model's processor "
                "(pixel_values, input_features, decoder_input_ids), or leave it out with towers="
            )
        needed = {}
        for t in self.order[:-1]:
            inner = set(range(len(self.blocks[t]) - 1))
            needed[t] = {j for j in inner if self._run({t: {j}})} if self._run({t: inner}) else set()
        return self.order, needed

    def _run(self, poisoned: dict[int, set[int]]) -> bool:
        """True if NaN arrives in another tower."""
        order: list[int] = []
        arrived: list[bool] = []

        def player(t: int, j: int) -> Callable[..., Any]:
            parameters = parameters_of(self.blocks[t][j])

            def forward(*args: Any, **kwargs: Any) -> Any:
                call, hidden = call_of(args, kwargs, parameters)
                if t not in order:
                    order.append(t)
                    if t not in self.wraps:
                        self.wraps[t] = wrapper(call.output(self.first[t], hidden))
                if poisoned and t not in poisoned:
                    arrived.append(_has_nan((call.args, call.kwargs, hidden)))
                    if t == self.order[-1] and j == len(self.blocks[t]) - 1:
                        raise _Enough
                bad = j in poisoned.get(t, ())
                return self.wraps[t](torch.full_like(hidden, torch.nan) if bad else _clean(hidden))

            return forward

        forwards = {
            block: player(t, j) for t, blocks in enumerate(self.blocks) for j, block in enumerate(blocks)
        }
        with replaced(forwards), contextlib.suppress(_Enough):
            runner(self.source.model)(self.batch)
        self.order = self.order or order
        return any(arrived)


def _clean(hidden: Tensor) -> Tensor:
    """The NaN that one block put out must not reach the next ones by way of the stream."""
    if bool(torch.isnan(hidden).any()):
        return torch.nan_to_num(hidden)
    return hidden


def _has_nan(value: Any) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return any(bool(torch.isnan(t).any()) for t in tensors if t.is_floating_point())
