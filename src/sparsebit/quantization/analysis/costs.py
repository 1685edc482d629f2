"""What a forward costs, measured on one example: multiplications, bytes that live at once, state of observers.

Every aten op that multiplies matrices is counted with torch's own formulas, inside islands too; not those that read
only constants, which a runtime computes once. Its MACs are quantized when each operand came out of an active
quantizer, possibly moved around (view, cat, pad) since then.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebit.errors import CalibrationError
from sparsebit.graph.run.lanes import Lane
from sparsebit.graph.run.macs import parts
from sparsebit.quantization.layers import as_calls, is_active, undisturbed
from sparsebit.quantization.modules import Opr
from sparsebit.quantization.quantizers import Quantizer

aten = torch.ops.aten
Where = tuple[str, "nn.Module | None"]  # name of the node, and the innermost QModule in it

# Ops that only move values: a value on a grid stays on it. Views need no entry, because they share memory.
MOVES = {
    *("clone", "_unsafe_view", "_to_copy", "_reshape_copy", "copy_", "cat", "stack", "index", "index_select"),
    *("gather", "embedding", "roll", "flip", "repeat", "pixel_shuffle", "pixel_unshuffle", "im2col"),
    *("relu", "relu_", "max_pool2d_with_indices", "max_pool3d_with_indices", "constant_pad_nd"),
    *(f"{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)),
    *(f"upsample_nearest{d}d" for d in (1, 2, 3)),
}


@dataclass
class Measured:
    """One forward of the example."""

    macs: dict[Where, int] = field(default_factory=lambda: defaultdict(int))
    quantized: dict[Where, int] = field(default_factory=lambda: defaultdict(int))
    values: dict[str, int] = field(default_factory=dict)  # numbers in the output of a node
    peak: int = 0  # bytes of activations that live at once
    state: dict[Quantizer, int] = field(default_factory=dict)  # bytes of its observer's state
    cached: int = 0  # bytes that observers of the old kind add with every batch
    not_float: set[Quantizer] = field(default_factory=set)  # quantizers that got integers, or no tensor
    # where all that was multiplied is the same for every input
    constant: set[Where] = field(default_factory=set)


def macs_quantized(qmodel: Any, example: Any) -> tuple[int, int]:
    """(MACs whose operands are all quantized, all MACs) of one forward of `example`."""
    measured = measure(qmodel, example)
    return sum(measured.quantized.values()), sum(measured.macs.values())


def measure(qmodel: Any, example: Any) -> Measured:
    """Run `example` (one batch in any form that calibrate() takes) once, in float and eval mode."""
    gm: fx.GraphModule = qmodel.model
    calls = as_calls(gm, [example])
    lane = Lane(gm, calls)
    counter = _Counter()
    counter.make_vary(calls)
    with torch.no_grad(), undisturbed(gm), _watching(gm, counter), counter:
        for node in gm.graph.nodes:
            counter.node = node.name
            lane.step(node)
    counter.result.not_float -= counter.result.state.keys()
    return counter.result


class _Counter(TorchDispatchMode):
    """Sees every aten op of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.result = Measured()
        self.node = ""
        self.inside: list[nn.Module] = []  # the QModules being run
        self.paused = False
        self._on_grid: dict[int, StorageWeakRef] = {}  # a weak reference keeps the address from being reused
        self._varies: dict[int, StorageWeakRef] = {}  # memory of what depends on the inputs
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._live_bytes = 0  # an upper bound: the dead are counted until a peak is in question

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        varies = self._reads_inputs(func, args, kwargs)
        if varies:
            self.make_vary((out, args[:1] if func._schema.is_mutable else ()))
        if self.paused:
            return out
        packet = func._overloadpacket
        for macs, operands in parts(packet, args, kwargs or {}, out):
            key = (self.node, self.inside[-1] if self.inside else None)
            if not varies:
                self.result.constant.add(key)
                continue
            self.result.macs[key] += macs
            inner = self._rounds_probs()
            on_grid = [inner if x is None else self.is_on_grid(x) for x in operands]
            self.result.quantized[key] += macs * all(on_grid)
        outputs = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        if self.node and outputs:
            self.result.values[self.node] = outputs[0].numel()
        if packet.__name__ in MOVES:
            source = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            if all(map(self.is_on_grid, source)):
                self.put_on_grid(*outputs)
        elif func._schema.is_mutable and args and isinstance(args[0], Tensor):
            self._on_grid.pop(_address(args[0]), None)
        for x in outputs:
            self._allocated(x)
        return out

    def make_vary(self, values: Any) -> None:
        for x in pytree.tree_leaves(values):
            if isinstance(x, Tensor):
                self._varies[_address(x)] = StorageWeakRef(x.untyped_storage())

    def _reads_inputs(self, func: Any, args: Any, kwargs: Any) -> bool:
        tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        return torch.Tag.nondeterministic_seeded in func.tags or any(
            _address(x) in self._varies for x in tensors
        )

    def _rounds_probs(self) -> bool:
        """Does the attention being run round its probabilities, once it is quantized?"""
        probs = None
        if self.inside:
            probs = getattr(self.inside[-1], "probs", None)
        quantizer = getattr(probs, "input_quantizer", None)
        return quantizer is not None and is_active(quantizer)

    def is_on_grid(self, x: Any) -> bool:
        return isinstance(x, Tensor) and _address(x) in self._on_grid

    def put_on_grid(self, *tensors: Tensor) -> None:
        for x in tensors:
            self._on_grid[_address(x)] = StorageWeakRef(x.untyped_storage())

    def _allocated(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage._cdata in self._live:
            return
        self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live_bytes += storage.nbytes()
        if self._live_bytes > self.result.peak:
            self._live = {k: v for k, v in self._live.items() if not v[0].expired()}
            self._live_bytes = sum(size for _, size in self._live.values())
            self.result.peak = max(self.result.peak, self._live_bytes)


def _address(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


# -- where we listen --------------------------------------------------------------------------------
@contextmanager
def _watching(gm: nn.Module, counter: _Counter) -> Iterator[None]:
    def entered(module: nn.Module, args: Any) -> None:
        counter.inside.append(module)

    def left(module: nn.Module, args: Any, out: Any) -> None:
        counter.inside.pop()

    with ExitStack() as handles:
        add = lambda handle: handles.callback(handle.remove)
        for module in gm.modules():
            if isinstance(module, Quantizer):
                add(module.register_forward_hook(lambda q, args, out: _mark(counter, q, out)))
            elif isinstance(module, Opr):
                add(module.register_forward_pre_hook(entered))
                add(module.register_forward_hook(left, always_call=True))
        yield


def _mark(counter: _Counter, quantizer: Quantizer, out: Any) -> Any:
    """The output of a quantizer gets new memory, so that its source does not count as quantized."""
    if quantizer.absorbed or quantizer.unused:
        return None
    if not isinstance(out, Tensor) or not out.is_floating_point():
        counter.result.not_float.add(quantizer)
        return None
    counter.paused = True
    try:
        if quantizer not in counter.result.state:
            state, cached = _observed(quantizer, out)
            counter.result.state[quantizer] = state
            counter.result.cached += cached
        out = out.clone()
        counter.put_on_grid(out)
        return out
    finally:
        counter.paused = False


def _observed(quantizer: Quantizer, x: Tensor) -> tuple[int, int]:
    """Bytes of an observer's state after one batch, and those of batches it keeps."""
    probe = copy.deepcopy(quantizer.observer)
    probe.reset()
    try:
        probe.update(x)
    except CalibrationError:  # NaN in the example: calibration will say so, with the layer's name
        return 0, 0
    total = _bytes_below(vars(probe))
    if not probe.keeps_batches or probe.is_weight:
        per_batch = 0
    else:
        per_batch = x.numel() * 4
    return total - per_batch, per_batch


def _bytes_below(value: Any, depth: int = 3) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, nn.Module) or depth == 0:
        return 0
    if isinstance(value, dict):
        return sum(_bytes_below(v, depth - 1) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_bytes_below(v, depth - 1) for v in value)
    if hasattr(value, "__dict__"):
        return _bytes_below(vars(value), depth - 1)
    return 0
