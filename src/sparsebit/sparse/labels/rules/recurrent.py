"""LSTM, GRU and RNN: the hidden size. All gates, layers and directions have the same labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence

from sparsebit.sparse.labels.rules import channel_rule
from sparsebit.sparse.labels.rules.sequences import packed

if TYPE_CHECKING:
    from sparsebit.sparse.labels.walk import Walk


@channel_rule(nn.RNNBase)
def recurrent(walk: Walk, node: fx.Node, input: Any, hx: Any = None) -> Any:
    """A module has one hidden_size, so every layer and direction loses the same units."""
    module = walk.module(node)
    path = str(node.target)
    ins = walk.labels.along(input.data if isinstance(input, PackedSequence) else input, -1)
    hidden = _labels(walk, f"{path}.weight_ih_l0", 0, module.hidden_size)
    out = hidden
    if getattr(module, "proj_size", 0):
        out = _labels(walk, f"{path}.weight_hr_l0", 0, module.proj_size)
    directions = 2 if module.bidirectional else 1
    for name in module._flat_weights_names:
        kind, layer = name.removesuffix("_reverse").rsplit("_l", 1)
        _cut(walk, f"{path}.{name}", kind, hidden, out, ins if layer == "0" else out.repeat(directions))
    walk.size(path, "input_size", ins)
    walk.size(path, "hidden_size", hidden)
    if out is not hidden:
        walk.size(path, "proj_size", out)
    for given, labels in zip(hx if isinstance(hx, tuple) else (hx,), (out, hidden)):
        if isinstance(given, Tensor):
            walk.labels.join(walk.labels.along(given, -1), labels)
    values, last = walk.values[node]
    state = tuple(last) if isinstance(last, tuple) else (last,)
    ends = tuple(v.expand(t.shape) for v, t in zip((out, hidden), state))
    channels = out.repeat(directions)
    if isinstance(values, PackedSequence):
        steps: Any = packed(walk, values, channels)
    else:
        steps = channels.expand(values.shape)
    return steps, ends if isinstance(last, tuple) else ends[0]


def _labels(walk: Walk, path: str, axis: int, n: int) -> Tensor:
    known = walk.known(path, axis)
    if known is not None:
        return known.labels[:n]
    if n > 1:
        return walk.labels.fresh(n)
    return torch.zeros(1, dtype=torch.long)


def _cut(walk: Walk, path: str, kind: str, hidden: Tensor, out: Tensor, ins: Tensor) -> None:
    """Cut one parameter, whose rows are gates x hidden units."""
    if kind == "weight_hr":
        walk.slice(path, 0, out, produces=True)
        walk.slice(path, 1, hidden)
        return
    tensor = walk.tensor(path)
    walk.slice(path, 0, hidden.repeat(tensor.shape[0] // len(hidden)), produces=kind == "weight_ih")
    if tensor.dim() == 2:
        walk.slice(path, 1, ins if kind == "weight_ih" else out)
