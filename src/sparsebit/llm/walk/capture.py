"""How the model calls its blocks: one forward with blocks that only record their arguments.

The hidden state that enters the first block is kept, and for every block the other arguments (masks, positions), so
that blocks can be run one at a time, without the model around them. Towers that are done already (an encoder, when it
is the decoder's turn) return their recorded outputs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import CalibrationError
from sparsebit.graph.run.batches import as_iterable
from sparsebit.graph.run.calls import Call as ForwardCall
from sparsebit.graph.run.calls import to_device
from sparsebit.graph.run.signature import signature_of
from sparsebit.llm.walk.spill import Spilled, copied

HIDDEN = ("hidden_states", "x", "hidden", "input")


@dataclass(frozen=True)
class Call:
    """The arguments of one block for one batch, with a hole in the place of the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hole: int | str

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return first_tensor(self.output(block, hidden))

    def cast(self, dtype: torch.dtype) -> Call:
        """A copy with all float tensors in `dtype`."""

        def change(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                return value.to(dtype)
            return value

        return Call(pytree.tree_map(change, self.args), pytree.tree_map(change, self.kwargs), self.hole)

    def output(self, block: nn.Module, hidden: Tensor) -> Any:
        args = list(self.args)
        kwargs = dict(self.kwargs)
        if isinstance(self.hole, int):
            args[self.hole] = hidden
        else:
            kwargs[self.hole] = hidden
        return block(*args, **kwargs)


class Wrap:
    """The values that a block returns beside the hidden state."""

    def __init__(self, others: list[Any], tree: Any) -> None:
        self.others = others
        self.tree = tree
        self.tensors = any(isinstance(leaf, Tensor) for leaf in others)

    def __call__(self, hidden: Tensor) -> Any:
        if self.tree is None:
            return hidden
        return pytree.tree_unflatten([hidden, *self.others], self.tree)


def first_tensor(output: Any) -> Tensor:
    if isinstance(output, (tuple, list)):
        return output[0]
    return output


class _Enough(Exception):
    """The last block has been reached: the layers behind it, such as a large head, need not run."""


class Captured:
    """hidden[batch] enters the first block; calls[block][batch] are the other arguments."""

    def __init__(self, blocks: int, spill: Path | None = None) -> None:
        self.hidden: Any = [] if spill is None else Spilled(spill)  # a list of tensors, or one on disk
        self.calls: list[list[Call]] = [[] for _ in range(blocks)]
        self.wraps: list[Wrap] = []  # of each batch: how a block returns the hidden state
        self.needed: set[int] = set()  # blocks whose outputs have another reader than the next block
        self.inner: dict[int, Any] = {}  # those outputs

    def __len__(self) -> int:
        return len(self.hidden)

    def copy(self, start: int = 0) -> Captured:
        """A copy for the batches from `start` on, with separate hidden states."""
        other = Captured(len(self.calls))
        if start:
            other.hidden = self.hidden[start:]
        else:
            other.hidden = copied(self.hidden)
        other.calls = [calls[start:] for calls in self.calls]
        other.wraps = self.wraps[start:]
        other.needed = self.needed
        return other

    def passed(self, block: int) -> None:
        """`hidden` is now what this block gives."""
        if block in self.needed:
            self.inner[block] = copied(self.hidden)


@dataclass(frozen=True)
class Replay:
    """A finished tower: its blocks, and the outputs that other towers read, batch by batch."""

    blocks: Sequence[nn.Module]
    outputs: dict[int, Any]
    wraps: list[Wrap]

    def player(self, index: int, again: bool = False) -> Callable[..., Any]:
        """A forward that gives the outputs batch after batch; with `again` those of the first batch every time."""
        parameters = parameters_of(self.blocks[index])
        count = [0]

        def forward(*args: Any, **kwargs: Any) -> Any:
            batch = count[0]
            hidden = call_of(args, kwargs, parameters)[1]
            count[0] += not again
            return self.wraps[batch](self.outputs[index][batch] if index in self.outputs else hidden)

        return forward


@torch.no_grad()
def capture(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    batches: Iterable[Any],
    first: nn.Module,
    spill: Path | None = None,
    before: Sequence[Replay] = (),
) -> Captured:
    """Runs the layers before and between the blocks. `first` is a copy of the first block; it shows the form of the
    outputs.

    spill   a folder for the hidden states.
    before  towers that are done.
    """
    found = Captured(len(blocks), spill)

    def recorder(index: int) -> Callable[..., Any]:
        parameters = parameters_of(blocks[index])

        def forward(*args: Any, **kwargs: Any) -> Any:
            call, hidden = call_of(args, kwargs, parameters)
            if index == 0:
                found.wraps.append(_wrap(found, call, hidden, first))
                found.hidden.append(hidden.clone())
                came[:] = [hidden]
            elif not came or not _same(came[0], hidden):
                raise CalibrationError(
                    f"the model changes the hidden state between block {index - 1} and block {index} of a tower, so "
                    "that blocks cannot be run one by one; leave this tower out with towers=, or blocks="
                )
            found.calls[index].append(call)
            if index == len(blocks) - 1:
                raise _Enough
            return found.wraps[-1](hidden)

        return forward

    came: list[Tensor] = []
    forwards = {block: recorder(i) for i, block in enumerate(blocks)}
    for tower in before:
        forwards.update({block: tower.player(i) for i, block in enumerate(tower.blocks)})
    with replaced(forwards):
        run = runner(model)
        for batch in as_iterable(batches):
            with contextlib.suppress(_Enough):
                run(batch)
    _check(found)
    return found


@contextlib.contextmanager
def replaced(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Blocks with other forwards: instance attributes, so that attributes of the blocks stay readable."""
    try:
        for block, forward in forwards.items():
            block.__dict__["forward"] = forward
        yield
    finally:
        for block in forwards:
            block.__dict__.pop("forward", None)


def runner(model: Any) -> Callable[..., Any]:
    """Runs the model on a batch, without a cache of keys and values; more arguments go by name."""
    signature = signature_of(model)
    config: Any = getattr(model, "config", None)
    takes = {p.kind for p in signature.parameters.values()}
    cached = hasattr(config, "get_text_config") and hasattr(config.get_text_config(), "use_cache")
    passed_on = cached and inspect.Parameter.VAR_KEYWORD in takes
    extra = {}
    if "use_cache" in signature.parameters or passed_on:
        extra = {"use_cache": False}
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))

    def run(batch: Any, **more: Any) -> Any:
        args, kwargs = ForwardCall.of(batch, signature)
        return model(
            *to_device(args, device), **{**to_device(kwargs, device), **extra, **to_device(more, device)}
        )

    return run


def parameters_of(block: nn.Module) -> list[str]:
    return list(inspect.signature(block.forward).parameters)


def _wrap(found: Captured, call: Call, hidden: Tensor, first: nn.Module) -> Wrap:
    """Made once; but where a block returns more tensors (T5's positions), these belong to one batch."""
    if found.wraps and not found.wraps[0].tensors:
        return found.wraps[0]
    return wrapper(call.output(first, hidden))


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a, b))


def _check(found: Captured) -> None:
    if not len(found.hidden):
        raise CalibrationError("no calibration data: `batches` is empty; 32 sequences are a good start")
    short = [i for i, calls in enumerate(found.calls) if len(calls) != len(found.hidden)]
    if short:
        raise CalibrationError(
            f"block {short[0]} ran {len(found.calls[short[0]])} times for {len(found.hidden)} batches; "
            "models that skip or repeat blocks cannot be walked"
        )


def call_of(args: tuple[Any, ...], kwargs: dict[str, Any], parameters: list[str]) -> tuple[Call, Tensor]:
    hole: int | str | None = next((i for i, a in enumerate(args) if isinstance(a, Tensor)), None)
    if hole is None:
        names = [*parameters[:1], *HIDDEN]
        hole = next((n for n in names if isinstance(kwargs.get(n), Tensor)), None)
    if hole is None:
        raise CalibrationError(
            f"the blocks get no hidden state that can be recognised: {len(args)} arguments and {sorted(kwargs)}"
        )
    if isinstance(hole, int):
        hidden = args[hole]
    else:
        hidden = kwargs[hole]
    args = tuple(None if i == hole or _is_cache(a) else a for i, a in enumerate(args))
    return Call(args, {k: None if _is_cache(v) else v for k, v in kwargs.items() if k != hole}, hole), hidden


def _is_cache(value: Any) -> bool:
    """Keys and values of earlier tokens: a block that is run again must not see its own."""
    return type(value).__name__.endswith("Cache")


def wrapper(output: Any) -> Wrap:
    """Puts a hidden state where the block's own output had it."""
    if isinstance(output, Tensor):
        return Wrap([], None)
    leaves, tree = pytree.tree_flatten(output)
    return Wrap(leaves[1:], tree)
