"""Pads, shuffles of pixels and channels, sliding windows: values move or are repeated, no quantizer."""

from __future__ import annotations

from torch import nn

from sparsebit.quantization.modules.base import Opr, define, spelled

KINDS = ("ConstantPad", "ZeroPad", "ReflectionPad", "ReplicationPad", "CircularPad")

Pad = define(
    "Pad",
    Opr,
    *(getattr(nn, f"{kind}{d}d") for kind in KINDS for d in (1, 2, 3)),
    *spelled("pad constant_pad_nd"),
)
PixelShuffle = define("PixelShuffle", Opr, nn.PixelShuffle, *spelled("pixel_shuffle"))
PixelUnshuffle = define("PixelUnshuffle", Opr, nn.PixelUnshuffle, *spelled("pixel_unshuffle"))
ChannelShuffle = define(
    "ChannelShuffle", Opr, nn.ChannelShuffle, *spelled("channel_shuffle native_channel_shuffle")
)
Unfold = define("Unfold", Opr, nn.Unfold, *spelled("unfold"))
Fold = define("Fold", Opr, nn.Fold, *spelled("fold"), doc="Sums what overlaps.")
