"""How the model calls its blocks: one forward with blocks that only write down what they get.

The hidden state that enters the first block is kept, and for every block the other arguments (masks, positions), so
that blocks can be run one at a time, without the model around them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import CalibrationError
from sparsebit.graph.feeding import as_call, as_iterable, signature_of, to_device
from sparsebit.llm.spill import Spilled

HIDDEN = ("hidden_states", "x", "hidden", "input")


@dataclass(frozen=True)
class Call:
    """The arguments of one block for one batch, with a hole where the hidden state goes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hole: int | str

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return first_tensor(self.output(block, hidden))

    def cast(self, dtype: torch.dtype) -> Call:
        """With all float tensors in `dtype`."""

        def change(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        return Call(pytree.tree_map(change, self.args), pytree.tree_map(change, self.kwargs), self.hole)

    def output(self, block: nn.Module, hidden: Tensor) -> Any:
        args, kwargs = list(self.args), dict(self.kwargs)
        if isinstance(self.hole, int):
            args[self.hole] = hidden
        else:
            kwargs[self.hole] = hidden
        return block(*args, **kwargs)


def first_tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output


class _Enough(Exception):
    """The last block has been reached: what follows, such as a large head, need not run."""


class Captured:
    """hidden[batch] enters the first block; calls[block][batch] are the other arguments."""

    def __init__(self, blocks: int, spill: Path | None = None) -> None:
        self.hidden: Any = [] if spill is None else Spilled(spill)  # a list of tensors, or one on disk
        self.calls: list[list[Call]] = [[] for _ in range(blocks)]

    def __len__(self) -> int:
        return len(self.hidden)


@torch.no_grad()
def capture(
    model: nn.Module,
    blocks: nn.ModuleList,
    batches: Iterable[Any],
    first: nn.Module,
    spill: Path | None = None,
) -> Captured:
    """Runs what lies before and between the blocks; `first` is a copy of the first block, to see what blocks return.

    spill   a folder for the hidden states.
    """
    found = Captured(len(blocks), spill)
    signature = signature_of(model)
    extra = {"use_cache": False} if "use_cache" in signature.parameters else {}
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    wrap: list[Callable[[Tensor], Any]] = []  # how a block returns the hidden state

    def recorder(index: int) -> Callable[..., Any]:
        parameters = list(inspect.signature(blocks[index].forward).parameters)

        def forward(*args: Any, **kwargs: Any) -> Any:
            call, hidden = call_of(args, kwargs, parameters)
            if index == 0:
                if not wrap:
                    wrap.append(wrapper(call.output(first, hidden)))
                found.hidden.append(hidden.clone())
            found.calls[index].append(call)
            if index == len(blocks) - 1:
                raise _Enough
            return wrap[0](hidden)

        return forward

    try:
        for i, block in enumerate(
            blocks
        ):  # instance attributes, so that attributes of the block stay readable
            block.__dict__["forward"] = recorder(i)
        for batch in as_iterable(batches):
            args, kwargs = as_call(batch, signature)
            with contextlib.suppress(_Enough):
                model(*to_device(args, device), **{**to_device(kwargs, device), **extra})
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)
    _check(found)
    return found


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
    hidden = args[hole] if isinstance(hole, int) else kwargs[hole]
    args = tuple(None if i == hole else a for i, a in enumerate(args))
    return Call(args, {k: v for k, v in kwargs.items() if k != hole}, hole), hidden


def wrapper(output: Any) -> Callable[[Tensor], Any]:
    """Puts a hidden state where the block's own output had it."""
    if isinstance(output, Tensor):
        return lambda hidden: hidden
    leaves, tree = pytree.tree_flatten(output)
    return lambda hidden: pytree.tree_unflatten([hidden, *leaves[1:]], tree)
