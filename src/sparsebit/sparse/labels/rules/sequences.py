"""Packed sequences: the steps of all sequences in a row, with the channels on the last axis.

Their labels are a PackedSequence of labels. Lengths and orders are numbers without channels.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)

from sparsebit.graph.ops import op_of
from sparsebit.sparse.labels.rules import channel_rule
from sparsebit.sparse.labels.rules.moves import spelled

if TYPE_CHECKING:
    from sparsebit.sparse.labels.walk import Walk

PEAKS = spelled("max amax")


def packed(walk: Walk, value: PackedSequence, channels: Tensor) -> PackedSequence:
    """Labels of `value`, whose steps all have the labels `channels`."""
    rest = []
    for t in value[1:]:
        rest.append(None if t is None else walk.fixed(t))
    return PackedSequence(channels.expand(value.data.shape), *rest)


@channel_rule(pack_padded_sequence)
def pack(walk: Walk, node: fx.Node, input: Tensor, lengths: Any, *args: Any, **kwargs: Any) -> Any:
    if {0, 1} & {*walk.labels.varies(input)} or (isinstance(lengths, Tensor) and walk.labels.varies(lengths)):
        return NotImplemented  # channels along the batch or along time
    return packed(walk, walk.values[node], input[0, 0])


@channel_rule(pad_packed_sequence)
def unpack(
    walk: Walk,
    node: fx.Node,
    sequence: PackedSequence,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: Any = None,
) -> Any:
    """Padding other than zero also fills the place of a removed channel, so its readers need zeros there."""
    padded, lengths = walk.values[node]
    if 0 in walk.labels.varies(sequence.data):
        return NotImplemented
    if not math.isfinite(padding_value) and not (
        padding_value < 0 and _is_pooled(walk, node, int(batch_first), padded.dim())
    ):
        walk.fix(sequence.data, node, f"pads with {padding_value}, which times zero is not zero")
    return sequence.data[0].expand(padded.shape), walk.fixed(lengths)


def _is_pooled(walk: Walk, node: fx.Node, time: int, rank: int) -> bool:
    """`pad_packed_sequence(out, padding_value=-inf)[0].max(0)`: no padding is left in the result."""
    parts = [u for u in node.users if u.target is operator.getitem and isinstance(u.args[1], int)]
    readers = []
    for part in parts:
        if part.args[1] in (0, -2):
            for user in part.users:
                readers.append(user)
    over = lambda user: user.kwargs.get("dim", user.args[1] if len(user.args) > 1 else None)
    return len(parts) == len(node.users) and all(
        op_of(user, walk.gm) in PEAKS and over(user) in (time, time - rank) for user in readers
    )


@channel_rule(PackedSequence)
def make(walk: Walk, node: fx.Node, data: Any, *args: Any, **kwargs: Any) -> Any:
    """`PackedSequence(self.embed(x.data), x.batch_sizes)`"""
    if not isinstance(walk.values[node], PackedSequence) or not isinstance(data, Tensor):
        return NotImplemented
    if 0 in walk.labels.varies(data):
        return NotImplemented
    return packed(walk, walk.values[node], data[0])


@channel_rule("_replace")
def replace(walk: Walk, node: fx.Node, sequence: Any, **new: Any) -> Any:
    """`x._replace(data=self.embed(x.data))`"""
    return make(walk, node, **sequence._replace(**new)._asdict())


@channel_rule(pad_sequence, pack_sequence)
def together(walk: Walk, node: fx.Node, sequences: Any, *args: Any, **kwargs: Any) -> Any:
    """All sequences have the same channels."""
    if not isinstance(sequences, (list, tuple)) or any(0 in walk.labels.varies(s) for s in sequences):
        return NotImplemented
    padding = kwargs.get("padding_value", args[1] if len(args) > 1 else 0.0)
    if not math.isfinite(padding):
        return NotImplemented
    for other in sequences[1:]:
        walk.labels.join(sequences[0][0], other[0])
    value = walk.values[node]
    if isinstance(value, PackedSequence):
        return packed(walk, value, sequences[0][0])
    return sequences[0][0].expand(value.shape)
