"""Scales that move between layers: y = W s (x / s), with 1 / s folded into the producer of x, so the model stays plain.

The producer of x is found, not declared. It is the norm whose output is x, or an earlier Linear whose rows reach x
channel by channel (v through attention to the output projection, up through the gate to down). A producer counts only
if the outputs of the block and its layers stay the same with random scales.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.llm.models.experts import is_routed
from sparsebit.llm.walk.capture import Call, first_tensor

TRIES = 60  # forward passes that one search may take
TOLERANCE = 1e-3  # of the largest value; a wrong guess is off by tens of percent


@dataclass(frozen=True)
class Feeder:
    """The producer of the input of some layers: a norm (rows None), or a Linear whose row rows[c] makes channel c."""

    name: str
    rows: Tensor | None = None


def fold(block: nn.Module, feeder: Feeder, layers: list[str], scales: Tensor) -> None:
    """Divides what `feeder` gives by `scales`, and multiplies the layers' columns with them."""
    for name in layers:
        _set(block.get_submodule(name), "weight", lambda w: w.float() * scales)
    module = block.get_submodule(feeder.name)
    if feeder.rows is None:
        offset = norm_offset(module)
        _set(module, "weight", lambda w: (w.float() + offset) / scales - offset)
        _set(module, "bias", lambda b: b.float() / scales)
        return
    rows = torch.ones(len(module.weight), device=scales.device).index_put((feeder.rows,), scales)  # type: ignore[arg-type]
    _set(module, "weight", lambda w: w.float() / rows[:, None])
    _set(module, "bias", lambda b: b.float() / rows)


def norm_offset(norm: Any) -> float:
    """The number that a norm adds to its weight before it multiplies: 0, or 1 in Gemma."""
    probe = copy.deepcopy(norm).float()
    probe.weight.data.zero_()
    if getattr(probe, "bias", None) is not None:
        probe.bias.data.zero_()
    x = torch.arange(1.0, len(norm.weight) + 1, device=norm.weight.device)[None]
    with torch.no_grad():
        return 0.0 if not bool(first_tensor(probe(x)).any()) else 1.0


def _set(module: Any, leaf: str, change: Any) -> None:
    old = getattr(module, leaf, None)
    if old is not None:
        setattr(module, leaf, nn.Parameter(change(old.data).to(old.dtype), requires_grad=False))


class Feeders:
    """Finds feeders block by block. The feeders of one block are tried first in the next."""

    def __init__(self) -> None:
        self.known: dict[str, Feeder | None] = {}

    @torch.no_grad()
    def find(
        self, block: nn.Module, groups: list[list[str]], call: Call, hidden: Tensor
    ) -> list[Feeder | None]:
        """One for each group of layers that read one tensor, or None where there is none."""
        probe = copy.deepcopy(block).float()
        trial = Trial(probe, groups, call.cast(torch.float32), hidden.float())
        return [self._find(trial, group) for group in groups]

    def _find(self, trial: Trial, group: list[str]) -> Feeder | None:
        if group[0] not in trial.inputs:  # it did not run
            return None
        known = self.known.get(group[0])
        if known is not None and trial.keeps(known, group):
            return known
        if group[0] not in self.known or known is not None:
            guesses = (g for _, g in zip(range(TRIES), trial.guesses(group)))
            self.known[group[0]] = next((g for g in guesses if trial.keeps(g, group)), None)
        return self.known[group[0]]


class Trial:
    """A float32 copy of a block, what its modules give, and whether they still do with scales folded in."""

    def __init__(self, block: nn.Module, groups: list[list[str]], call: Call, hidden: Tensor) -> None:
        self.block = block
        self.call = call
        self.hidden = hidden
        self.layers = [name for group in groups for name in group]
        self.inputs: dict[str, Tensor] = {}
        self.outputs: list[tuple[str, Any]] = []  # in the order of running
        self.expected = self._run(record=True)

    def keeps(self, feeder: Feeder, group: list[str]) -> bool:
        """True if all layers of the group, and the block, return the same values with random scales."""
        width = self.inputs[group[0]].shape[-1]
        generator = torch.Generator().manual_seed(0)
        scales = (torch.rand(width, generator=generator) + 0.5).to(self.hidden.device)
        if feeder.rows is not None:  # channels of one row share its scale
            scales = scales[feeder.rows % width]
        names = [feeder.name, *group]
        old = {name: dict(self.block.get_submodule(name)._parameters) for name in names}
        fold(self.block, feeder, group, scales)
        try:
            found = self._run(record=False)
        finally:
            for name, parameters in old.items():
                self.block.get_submodule(name)._parameters.update(parameters)
        watched = ["", *group]
        return all(_close(found[name], self.expected[name]) for name in watched if name in self.expected)

    def guesses(self, group: list[str]) -> Iterator[Feeder]:
        x = self.inputs[group[0]]
        width = x.shape[-1]
        for name, out in self.outputs:
            if out is x and _is_norm(self.block.get_submodule(name), width):
                yield Feeder(name)
        ran = [name for name, _ in self.outputs]
        before = ran[: ran.index(group[0])]
        if is_routed(self.block, group[0]):  # what an expert gets comes from the same expert
            own = group[0].rpartition(".")[0]
            before = [name for name in before if name.rpartition(".")[0] == own]
        for name in reversed(before):
            if name in self.layers and name not in group:
                producer: Any = self.block.get_submodule(name)
                for rows in row_maps(len(producer.weight), width, self._head_sizes(width)):
                    yield Feeder(name, rows.to(x.device))

    def _head_sizes(self, width: int) -> list[int]:
        said: list[Any] = [getattr(m, "head_dim", None) for m in self.block.modules()]
        told = {size for size in said if isinstance(size, int)}
        return sorted(told) or [n for n in (64, 128, 32, 16, 8, 4, 2, 96, 80, 256) if width % n == 0]

    def _run(self, record: bool) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def after(name: str) -> Any:
            def hook(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
                if name in self.layers:
                    found.setdefault(name, first_tensor(out))
                if record:
                    self.outputs.append((name, out))
                    if name in self.layers:
                        self.inputs[name] = args[0] if args else next(iter(kwargs.values()))

            return hook

        handles = [
            module.register_forward_hook(after(name), with_kwargs=True)
            for name, module in self.block.named_modules()
            if name
        ]
        try:
            found[""] = self.call.run(self.block, self.hidden)
        finally:
            for handle in handles:
                handle.remove()
        return found


def row_maps(rows: int, width: int, head_sizes: list[int]) -> Iterator[Tensor]:
    """Ways in which the rows of a Linear may become `width` channels: plain, the last part, heads that are shared."""
    channels = torch.arange(width)
    if rows >= width and rows % width == 0:
        yield channels + rows - width
    for size in head_sizes:
        # a separate layer, or the last part of fused q, k, v
        if rows < width:
            shared = rows
        else:
            shared = (rows - width) // 2
        heads = width // size
        kept = shared // size
        if width % size == 0 and shared % size == 0 and kept and heads % kept == 0 and heads > kept:
            yield (channels // size // (heads // kept)) * size + channels % size + rows - shared
        if rows == 3 * width and width % size == 0:  # q, k, v head by head
            yield channels // size * 3 * size + 2 * size + channels % size


def _is_norm(module: Any, width: int) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.shape == (width,)


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= TOLERANCE * float(b.abs().max())
