"""Activations that only clip (ReLU, ReLU6, a learned bound), taken into the quantizer behind them.

A grid is monotone, so round(clip(x, a, b)) = clip(round(x), round(a), round(b)): the clip moves behind the rounding,
where it is a Clip of integers, or nothing at all where the grid saturates there anyway. What computed x then stands
right in front of the quantizer, as integer kernels want it.
"""

from __future__ import annotations

import json

import onnx_ir as ir

from sparsebit.export.onnx.graph_edit import array_of, is_mark, name_of, readers, replace
from sparsebit.export.onnx.lowered import Clip
from sparsebit.export.onnx.marks import Mark, Marks
from sparsebit.export.onnx.qdq import clip_of, codes_of


def absorb_clips(model: ir.Model, marks: Marks, in_codes: bool = True) -> int:
    """`in_codes=False`: only those that change no code, for runtimes without a Clip of integers."""
    absorbed = 0
    for node in reversed(list(model.graph)):
        out = node.outputs[0]
        bounds = _bounds(node)
        if bounds is None or not readers(out) or out.is_graph_output():
            continue
        if all(_takes(user, bounds, marks, in_codes) for user in readers(out)):
            for user in readers(out):
                _give(user, bounds, marks)
            assert node.inputs[0] is not None
            replace(node, node.inputs[0])
            absorbed += 1
    return absorbed


def _bounds(node: ir.Node) -> list[Clip] | None:
    """The bounds to which the node clips, one pair or one per channel; None: it does something else."""
    if node.domain or node.op_type not in ("Relu", "Clip", "Min", "Max"):
        return None
    if node.op_type == "Relu":
        return [(0.0, None)]
    limits = [None if v is None else array_of(v) for v in node.inputs[1:]]
    if any(v is not None and limit is None for v, limit in zip(node.inputs[1:], limits)) or not limits:
        return None  # not a constant
    if node.op_type == "Clip":
        low, high = ([*limits, None])[:2]
        return [(None if low is None else float(low), None if high is None else float(high))]
    if len(limits) != 1 or limits[0] is None or array_of(node.inputs[0]) is not None:
        return None
    values = [float(v) for v in limits[0].flatten()]
    if node.op_type == "Min":
        return [(None, v) for v in values]
    return [(v, None) for v in values]


def _takes(user: ir.Node, bounds: list[Clip], marks: Marks, in_codes: bool) -> bool:
    if not is_mark(user) or name_of(user) not in marks:
        return False
    mark = marks[name_of(user)]
    if mark.is_weight or _changes_nothing(bounds, mark):
        return not mark.is_weight
    low, high = _joined(bounds[0], clip_of(user))
    fits = low is None or high is None or low <= high
    return in_codes and mark.spec.bits <= 8 and len(bounds) == 1 and mark.qparams.scale.numel() == 1 and fits


def _give(user: ir.Node, bounds: list[Clip], marks: Marks) -> None:
    if not _changes_nothing(bounds, marks[name_of(user)]):
        user.metadata_props["clip"] = json.dumps(_joined(bounds[0], clip_of(user)))


def _joined(a: Clip, b: Clip) -> Clip:
    lows, highs = ([v for v in pair if v is not None] for pair in zip(a, b))
    return (max(lows) if lows else None), (min(highs) if highs else None)


def _changes_nothing(bounds: list[Clip], mark: Mark) -> bool:
    """Does the grid end at the bounds, or before them, in every channel?"""
    lows, highs = ([v for v in side if v is not None] for side in zip(*bounds))
    below = not lows or bool((codes_of(max(lows), mark) == mark.spec.qmin).all())
    return below and (not highs or bool((codes_of(min(highs), mark) == mark.spec.qmax).all()))
