"""A block on all batches that stops at a layer and continues later, without running finished layers again.

A forward cannot stop in its middle, so it starts again. But finished modules, whose weights no longer change, return
their kept outputs. That only saves time: outputs that are not kept (ROOM is full, or other code wrote into them) are
made again, with the same values.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sparsebit.llm.walk.capture import Call
from sparsebit.llm.walk.spill import Spilled

ROOM = 2**30  # bytes of outputs that a lane keeps

# a call: names of modules from outside in, and which call of each in its caller
Key = tuple[tuple[str, int], ...]
Note = Callable[[str, Tensor], None]
Watched = tuple[set[str], Note]
NOTHING: Watched = (set(), lambda name, x: None)


class _Enough(Exception):
    """Everything that was asked for has been seen in this forward."""


class _Kept(NamedTuple):
    output: Any
    versions: list[tuple[Tensor, int]]
    size: int

    def untouched(self) -> bool:
        return all(tensor._version == version for tensor, version in self.versions)


class Lane:
    """`open` are the layers whose weights will change: nothing that runs from the first of them on is kept."""

    def __init__(self, block: nn.Module, calls: list[Call], hidden: Any, open: Iterable[str] = ()) -> None:
        self.block = block
        self.calls = calls
        self.hidden = hidden
        self.open = set(open)
        self.room = 0 if isinstance(hidden, Spilled) else ROOM
        self._kept: list[dict[Key, _Kept]] = [{} for _ in calls]
        self._surveyed: dict[int, tuple[list[tuple[str, tuple[Tensor, Tensor]]], Tensor]] = {}

    def __len__(self) -> int:
        return len(self.calls)

    def apart(self) -> Lane:
        """A new lane over the same block and batches, without kept outputs."""
        return Lane(self.block, self.calls, self.hidden)

    def settle(self, names: Iterable[str]) -> None:
        """These layers have the weights that they will keep."""
        self.open.difference_update(names)

    def forget(self) -> None:
        """Other weights have changed."""
        for i in range(len(self)):
            self._drop(i, list(self._kept[i]))

    def watch(self, i: int, names: Collection[str], note: Note, outputs: Collection[str] = ()) -> None:
        """Batch i: note(name, input) for these layers, for `outputs` their output; ends when all have run."""
        if i not in self._surveyed:
            _Run(self, i, (set(names) - set(outputs), note), (set(outputs), note)).start()
        for name, pair in self._surveyed.get(i, ([], None))[0]:
            if name in names:
                note(name, pair[name in outputs])

    def survey(self, i: int, names: Collection[str]) -> list[tuple[str, Tensor]]:
        """Batch i through the whole block: the inputs of these layers, in the order of running. They, the layers'
        outputs and the block's are kept unless the block writes into them: this is for blocks whose weights stay."""
        xs: list[tuple[str, Tensor]] = []
        ys: list[Tensor] = []  # a layer is done before the next of them begins
        versions: list[tuple[Tensor, int]] = []

        def note_input(name: str, x: Tensor) -> None:
            xs.append((name, x))
            versions.append((x, _version(x)))

        def note_output(name: str, y: Tensor) -> None:
            ys.append(y)
            versions.append((y, _version(y)))

        run = _Run(self, i, (set(names), note_input), (set(names), note_output))
        run.early = run.keeping = False
        output = run.start()
        assert output is not None
        if all(_version(tensor) == version for tensor, version in versions):
            self._surveyed[i] = [(name, (x, y)) for (name, x), y in zip(xs, ys)], output
        return xs

    def output(self, i: int, last: bool = False) -> Tensor:
        """Batch i through the whole block; `last`: it will not be asked for again."""
        if i in self._surveyed:
            return self._surveyed.pop(i)[1]
        run = _Run(self, i)
        run.keeping = not last
        found = run.start()
        if last:
            self._drop(i, list(self._kept[i]))
        assert found is not None
        return found

    def _keep(self, i: int, key: Key, output: Any, inside: list[Key]) -> None:
        """Instead of the outputs of what ran inside."""
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        size = sum(t.untyped_storage().nbytes() for t in tensors)
        room = self.room + sum(self._kept[i][k].size for k in inside if k in self._kept[i])
        if size > room or any(t.is_inference() for t in tensors):
            return
        self._drop(i, inside)
        self._kept[i][key] = _Kept(output, [(t, t._version) for t in tensors], size)
        self.room -= size

    def _drop(self, i: int, keys: Iterable[Key]) -> None:
        for key in keys:
            gone = self._kept[i].pop(key, None)
            self.room += 0 if gone is None else gone.size


def _version(tensor: Tensor) -> int:
    """A number that rises with every write into the tensor; tensors of inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version


class _Run:
    """One forward, with every module of the block asked first whether it has run before."""

    def __init__(self, lane: Lane, i: int, inputs: Watched = NOTHING, outputs: Watched = NOTHING) -> None:
        self.lane = lane
        self.i = i
        self.inputs = inputs
        self.outputs = outputs
        self.left = inputs[0] | outputs[0]
        self.early = bool(self.left)  # ends when all of them have run
        self.keeping = True
        self.frames: list[tuple[Key, Counter[str], list[Key]]] = [((), Counter(), [])]

    @torch.no_grad()
    def start(self) -> Tensor | None:
        lane = self.lane
        modules = [(name, module) for name, module in lane.block.named_modules() if name]
        before = [module.__dict__.get("forward") for _, module in modules]
        for name, module in modules:
            module.__dict__["forward"] = self._asking(name, module.forward)
        try:
            with _Functions(self._asking):
                return lane.calls[self.i].run(lane.block, lane.hidden[self.i])
        except _Enough:
            return None
        finally:
            for (_, module), forward in zip(modules, before):
                del module.__dict__["forward"]
                if forward is not None:
                    module.__dict__["forward"] = forward

    def _asking(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def ask(*args: Any, **kwargs: Any) -> Any:
            lane = self.lane
            above, count, done = self.frames[-1]
            key = (*above, (name, count[name]))
            count[name] += 1
            kept = lane._kept[self.i].get(key)
            if kept is not None and kept.untouched():
                done.append(key)
                return kept.output
            lane._drop(self.i, [key])
            self.keeping &= name not in lane.open
            if name in self.inputs[0]:
                self._tell(self.inputs, name, args[0] if args else next(iter(kwargs.values())))
            self.frames.append((key, Counter(), []))
            output = forward(*args, **kwargs)
            inside = self.frames.pop()[2]
            done += [key, *inside]
            if self.keeping:
                lane._keep(self.i, key, output, inside)
            if name in self.outputs[0]:
                self._tell(self.outputs, name, output)
            return output

        return ask

    def _tell(self, watched: Watched, name: str, x: Tensor) -> None:
        watched[1](name, x)
        self.left.discard(name)
        if self.early and not self.left:
            raise _Enough


class _Functions(TorchFunctionMode):
    """Attention, which lies between two layers of one module, is asked like a module."""

    def __init__(self, asking: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        super().__init__()
        self.attention = asking("attention()", F.scaled_dot_product_attention)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            func = self.attention
        return func(*args, **(kwargs or {}))
