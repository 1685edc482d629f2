"""equalize: one scale per channel in front of depthwise convolutions, at no cost.

In conv -> ReLU -> depthwise, dividing channel c of the middle value by r[c] is undone by multiplying filter c of the
depthwise convolution by r[c]. Weights have a scale per channel anyway, so they do not notice; the middle value gets
channels of equal range, and a single scale serves them all (Nagel et al., Data-Free Quantization, 2019; here the
factors come from the observed ranges). MobileNetV2 W8A8: 20.6 -> 22.2 dB.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from sparsebit.graph.ops import module_calls
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.pattern import Match, Pat, Rule
from sparsebit.quantization.modules.activations import QReLU, QReLU6
from sparsebit.quantization.modules.conv import QConv2d
from sparsebit.quantization.quantizers import Quantizer, build_quantizer

SMALLEST_FACTOR = 2.0**-8  # a channel is stretched at most that far

CHAIN = Pat(
    QConv2d,
    Pat((QReLU, QReLU6), Pat(QConv2d, name="conv"), name="act"),
    name="depthwise",
    where=lambda m, node: _is_depthwise(m.module("depthwise")),
)


class Equalization:
    """The chain that one depthwise convolution belongs to; its quantizer observes per channel, then folds."""

    def __init__(self, conv: QConv2d, act: Any, depthwise: QConv2d):
        self.conv, self.act, self.depthwise = conv, act, depthwise

    @property
    def quantizer(self) -> Quantizer:
        assert self.depthwise.input_quantizer is not None
        return self.depthwise.input_quantizer

    def unfold(self) -> None:
        """Before a calibration: observe every channel on its own."""
        self.quantizer.qdesc.is_perchannel = True

    @torch.no_grad()
    def fold(self) -> Tensor | None:
        """After it: move the differences between channels into the weights; one scale is left.

        Returns the factors (the middle value was divided by them); the weights need new scales now.
        """
        quantizer = self.quantizer
        if quantizer.absorbed or quantizer.unused:
            return None
        top = quantizer.observer.max_val.clamp(min=0)
        factor = torch.where(top > 0, top / top.max().clamp(min=1e-30), 1.0).clamp(min=SMALLEST_FACTOR)
        per_filter = factor.repeat_interleave(self.depthwise.out_channels // len(factor))
        self.depthwise.weight *= per_filter.to(self.depthwise.weight).view(-1, 1, 1, 1)
        self.conv.weight /= factor.to(self.conv.weight).view(-1, 1, 1, 1)
        if self.conv.bias is not None:
            self.conv.bias /= factor.to(self.conv.bias)
        if isinstance(self.act, QReLU6):
            self.act.cap /= factor.view(-1, 1, 1)
        quantizer.qdesc.is_perchannel = False
        quantizer.observer.min_val, quantizer.observer.max_val = top.new_zeros(1), top.max().reshape(1)
        quantizer.calc_qparams_with_minmax(quantizer.observer.min_val, quantizer.observer.max_val)
        return factor


def _is_depthwise(conv: QConv2d) -> bool:
    return conv.groups == conv.in_channels and conv.groups > 1


@graph_pass("equalize", when=lambda cfg: cfg.schedule.equalize, keeps_output=True)
def equalize(gm: fx.GraphModule, ctx: Any = None) -> int:
    """Find the chains; the work is done when the ranges are known."""
    calls = module_calls(gm)

    def mark(m: Match) -> fx.Node | None:
        conv, act, depthwise = (m.module(name) for name in ("conv", "act", "depthwise"))
        if any(calls[str(m[name].target)] > 1 for name in ("conv", "act", "depthwise")):
            return m.decline("a module of the chain is called more than once")
        weights = [c.weight_quantizer for c in (conv, depthwise)]
        if any(w is None or (not w.absorbed and not w.is_perchannel) for w in weights):
            return m.decline("the weights do not have a scale per channel")
        old = depthwise.input_quantizer
        if old is None or old.absorbed or old.is_perchannel or not _activation_is_free(act):
            return m.decline("the value between has no quantizer of one scale")
        scheme = "per-channel-symmetric" if old.is_symmetric else "per-channel-affine"
        new = build_quantizer(
            old.cfg.override("QSCHEME", scheme, "OBSERVER.TYPE", "minmax", "OBSERVER.LAYOUT", "NCHW")
        )
        new.name = old.name
        new.set_backend(old.backend)
        depthwise.input_quantizer = new
        if isinstance(act, QReLU6):
            act.cap = conv.weight.new_full((conv.out_channels, 1, 1), 6.0)
        depthwise.equalization = Equalization(conv, act, depthwise)
        return m.anchor

    return Rule("equalize", CHAIN, mark).apply(gm)


def _activation_is_free(act: Any) -> bool:
    """Its own input must not be quantized with one scale for all channels."""
    return act.input_quantizer is None or act.input_quantizer.absorbed
