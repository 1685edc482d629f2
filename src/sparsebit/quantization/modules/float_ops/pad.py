"""Pads, shuffles of pixels and channels, sliding windows: values move or are repeated, no quantizer."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from sparsebit.graph.ops import argument
from sparsebit.quantization.modules.base import Mover, define, spelled

KINDS = ("ConstantPad", "ZeroPad", "ReflectionPad", "ReplicationPad", "CircularPad")

Pad = define(
    "Pad",
    Mover,
    *(getattr(nn, f"{kind}{d}d") for kind in KINDS for d in (1, 2, 3)),
    *spelled("pad constant_pad_nd"),
)
PixelShuffle = define("PixelShuffle", Mover, nn.PixelShuffle, *spelled("pixel_shuffle"))
PixelUnshuffle = define("PixelUnshuffle", Mover, nn.PixelUnshuffle, *spelled("pixel_unshuffle"))
ChannelShuffle = define(
    "ChannelShuffle", Mover, nn.ChannelShuffle, *spelled("channel_shuffle native_channel_shuffle")
)
Unfold = define("Unfold", Mover, nn.Unfold, *spelled("unfold"))
Fold = define("Fold", Mover, nn.Fold, *spelled("fold"), doc="Sums what overlaps.")


def padded_with(node: fx.Node, op: Any) -> str:
    """The kind of padding that a call of the layer or function `op` adds: zeros, constant, reflect, replicate or
    circular."""
    if isinstance(op, nn.Module):
        kind = type(op).__name__.removesuffix("1d").removesuffix("2d").removesuffix("3d")
        modes = {"ReflectionPad": "reflect", "ReplicationPad": "replicate", "CircularPad": "circular"}
        mode = modes.get(kind, "constant")
        value = getattr(op, "value", 0)
    else:
        takes_mode = getattr(op, "__name__", "") == "pad"
        mode = "constant"
        if takes_mode:
            mode = argument(node, 2, "mode", "constant")
        value = argument(node, 3 if takes_mode else 2, "value", 0)
    is_zero = value is None or (isinstance(value, (int, float)) and value == 0)
    if mode == "constant" and is_zero:
        return "zeros"
    return str(mode)
