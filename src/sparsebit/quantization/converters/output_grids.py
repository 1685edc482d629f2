"""Who quantizes the output of an op, in the graph that onnxruntime gets: the exporter moves a quantizer in front of ops
that only move values (export/onnx/rewrites.py), and takes clips into it (export/onnx/clips.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from sparsebit.graph.ops import argument, called_module, module_calls
from sparsebit.quantization.layers import is_active
from sparsebit.quantization.modules import Opr, QuantOpr, find_qmodule
from sparsebit.quantization.modules.activations import QHardTanh, QReLU, QReLU6
from sparsebit.quantization.modules.base import is_number
from sparsebit.quantization.modules.float_ops.create import Create
from sparsebit.quantization.modules.float_ops.index import Select
from sparsebit.quantization.modules.float_ops.pad import (
    ChannelShuffle,
    Pad,
    PixelShuffle,
    PixelUnshuffle,
    padded_with,
)
from sparsebit.quantization.modules.float_ops.python_builtins import QGetAttr, QGetItem, reads_property
from sparsebit.quantization.modules.float_ops.torchvision_ops import DropBlock, StochasticDepth
from sparsebit.quantization.modules.math import Pointwise
from sparsebit.quantization.modules.pool import AdaptiveMaxPool, MaxPool1d, MaxPool2d, MaxPool3d
from sparsebit.quantization.modules.resize import QInterpolate, QUpsample
from sparsebit.quantization.modules.shape import (
    Concat,
    Expand,
    Expand_as,
    Flatten,
    Move,
    Permute,
    Repeat,
    Reshape,
    Split,
    Squeeze,
    Stack,
    Transpose,
    Unflatten,
)
from sparsebit.quantization.modules.unary import Cast, Clone, Contiguous, Detach, Dropout, QIdentity
from sparsebit.quantization.quantizers import Quantizer

CLIPS = (QReLU, QReLU6, QHardTanh)
VANISH = (Dropout, StochasticDepth, DropBlock, Clone, Contiguous, Detach, Cast, QIdentity)  # not in the file
MOVERS = (  # they keep the range of the values: an observer behind them sees what one in front sees
    *(Flatten, Unflatten, Reshape, Transpose, Permute, Squeeze, Expand, Expand_as),
    *(PixelShuffle, PixelUnshuffle, ChannelShuffle, MaxPool1d, MaxPool2d, MaxPool3d, QUpsample, QInterpolate),
)
PICKERS = (Concat, Stack, Split)  # an observer behind them sees another range
PADS = ("zeros", "reflect", "replicate", "circular")  # of codes; zero is a code of every grid
CLIP = "clip"
VANISHES = "vanishes"
MOVE = "move"
PICK = "pick"
MOVED_ONCE = (  # only the exporter moves a quantizer in front of these; onnxruntime does it for the others, once more
    *(
        PixelShuffle,
        PixelUnshuffle,
        QUpsample,
        QInterpolate,
        Expand,
        Expand_as,
        Repeat,
        Select,
        Pad,
        *PICKERS,
    ),
)
NAMED: dict[Any, tuple[str, tuple[str, ...]]] = {  # of these only some functions are moves in the file, too
    Pointwise: (CLIP, ("clamp", "clamp_min", "clamp_max", "clip")),
    Move: (MOVE, ("flip", "fliplr", "flipud", "roll", "rot90")),
    Repeat: (MOVE, ("repeat_interleave",)),
    Select: (PICK, ("select", "narrow", "index_select")),
}


@dataclass(frozen=True)
class Reader:
    """A quantizer that reads a value, and the ops between them."""

    quantizer: Quantizer
    calls: int
    clipped: bool = False
    picked: tuple[fx.Node, ...] = ()

    @property
    def grid(self) -> Any:
        """Equal for readers whose quantizers become one. Before calibration: those that will see the same values."""
        q = self.quantizer
        if not q.calibrated and q.tied:
            return q.spec, self.clipped, id(q.tied)
        if not q.calibrated:
            # it sees more values than those of this call
            owner = None
            if self.calls > 1:
                owner = q
            return q.spec, self.clipped, q.TYPE, type(q.observer), self.picked, owner
        starts_at_zero = not q.is_symmetric and not q.zero_point.any()
        clip = self.clipped and not starts_at_zero  # the clip changes no code of a grid that starts there
        return q.spec, clip, q.scale.flatten().tolist(), q.zero_point.flatten().tolist()

    def behind(self, node: fx.Node, how: str) -> Reader:
        """This quantizer, seen from the input of `node`."""
        if how == CLIP:
            return replace(self, clipped=True)
        picked = (node, *self.picked) if how == PICK else self.picked
        return replace(self, picked=picked)


class OutputGrids:
    """Which outputs of a graph are quantized by everything that reads them, and on one grid."""

    def __init__(self, gm: fx.GraphModule, all_readers: bool = False):
        """`all_readers`: also those in front of which no quantizer is moved, because others read the same value."""
        self.gm = gm
        self.calls = module_calls(gm)
        self.all_readers = all_readers
        self.known: dict[fx.Node, list[Reader] | None] = {}

    def __contains__(self, node: fx.Node) -> bool:
        readers = self._readers(node)
        return readers is not None and _on_one_grid(readers)

    def readers(self, node: fx.Node) -> list[Reader] | None:
        """The quantizers that read the output; None: something reads it in float."""
        return self._readers(node)

    def is_read_elsewhere(self, node: fx.Node) -> bool:
        """Has the value, or one that it is moved from, a second reader?"""
        while True:
            users = [user for user in node.users if not self._reads_size(user)]
            if len(users) > 1:
                return True
            module = called_module(node, self.gm)
            sources = node.all_input_nodes
            if not self._between(node, module) or isinstance(module, (Concat, Stack)) or len(sources) != 1:
                return False
            node = sources[0]

    def differ(self, node: fx.Node) -> bool:
        """Does everything that reads the output quantize it, but on several grids?"""
        return self._readers(node) is not None and node not in self

    def float_edges(self, node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """(value, reader) for every reader of the output in float, directly or behind ops that only move it."""
        found: list[tuple[fx.Node, fx.Node]] = []
        for user in node.users:
            module = called_module(user, self.gm)
            quantizer = None
            if isinstance(module, QuantOpr):
                quantizer = module.input_quantizer
            if self._reads_size(user) or (quantizer is not None and is_active(quantizer)):
                continue
            found += self.float_edges(user) if self._between(user, module) else [(node, user)]
        return list(dict.fromkeys(found))

    def _readers(self, node: fx.Node) -> list[Reader] | None:
        """All quantizers that read the value; None: something reads it in float."""
        if node not in self.known:
            found = [self._of_user(user) for user in node.users if not self._reads_size(user)]
            everybody: list[Reader] = []
            if None not in found:
                for readers in found:
                    everybody.extend(readers or [])
            self.known[node] = everybody or None
        return self.known[node]

    def _reads_size(self, user: fx.Node) -> bool:
        """`x.size(0)`, `x.device`, `torch.zeros_like(x)`: the values do not matter."""
        module = called_module(user, self.gm)
        is_property = isinstance(module, QGetAttr) and reads_property(user)
        return is_property or isinstance(module, Create) or is_number(user, self.gm)

    def _of_user(self, user: fx.Node) -> list[Reader] | None:
        module = called_module(user, self.gm)
        quantizer = None
        if isinstance(module, QuantOpr):
            quantizer = module.input_quantizer
        if quantizer is not None and is_active(quantizer):
            return [Reader(quantizer, self.calls[str(user.target)])]
        how = self._between(user, module)
        readers = self._readers(user) if how else None
        if readers is None:
            return None
        several = len({r.quantizer for r in readers}) > 1
        if several and _is_moved_once(user, module) and not self.all_readers and not _on_one_grid(readers):
            return None
        return [reader.behind(user, how) for reader in readers]

    def _between(self, node: fx.Node, module: Any) -> str:
        """The kind of the op for a quantizer behind it; "": the quantizer stays behind it."""
        if not node.op.startswith("call"):
            return ""
        kind: type[nn.Module] | None
        if isinstance(module, Opr):
            kind = type(module)
        else:
            kind = find_qmodule(node, self.gm)
        is_kind = lambda *kinds: kind is not None and issubclass(kind, kinds)
        if is_kind(QInterpolate, QUpsample) and not str(getattr(module, "mode", "")).startswith("nearest"):
            return ""
        if kind in NAMED:
            how, names = NAMED[kind]
            has_constants = how != CLIP or len(node.all_input_nodes) == 1
            return how if _function(module) in names and has_constants else ""
        if is_kind(QGetItem):
            return PICK if _is_slice(node.args[1]) else ""
        if is_kind(Pad):
            op = getattr(module, "op", None) or node.target
            return PICK if padded_with(node, op) in PADS else ""
        if is_kind(AdaptiveMaxPool):
            size = argument(node, 1, "output_size", getattr(getattr(module, "op", None), "output_size", None))
            return "" if _is_one(size) else MOVE
        table = {CLIP: CLIPS, VANISHES: VANISH, MOVE: MOVERS, PICK: PICKERS}
        return next((how for how, kinds in table.items() if is_kind(*kinds)), "")


def _on_one_grid(readers: list[Reader]) -> bool:
    first = readers[0]
    same = all((r.quantizer, r.clipped) == (first.quantizer, first.clipped) for r in readers)
    return same or all(r.grid == first.grid for r in readers)


def _function(module: Any) -> str:
    """The name of the function that a module stands for."""
    return getattr(getattr(module, "op", None), "__name__", "")


def _is_moved_once(node: fx.Node, module: Any) -> bool:
    if isinstance(module, QGetItem):
        if isinstance(node.args[1], tuple):
            parts = node.args[1]
        else:
            parts = (node.args[1],)
        return any(isinstance(part, int) for part in parts)
    return isinstance(module, MOVED_ONCE) or (isinstance(module, Move) and _function(module) == "roll")


def _is_slice(index: Any) -> bool:
    """A plain slice or place; a list of places is another op in the file."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in parts)


def _is_one(size: Any) -> bool:
    """A maximum over everything is not a pool in the file."""
    return all(n == 1 for n in (size if isinstance(size, (tuple, list)) else (size,)))
