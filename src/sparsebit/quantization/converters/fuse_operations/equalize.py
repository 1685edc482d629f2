"""equalize, equalize_sums: move differences between channels into weights, so that one scale serves all of them.

In conv -> ReLU -> depthwise, dividing channel c of the middle value by r[c] is undone by multiplying filter c of the
depthwise convolution by r[c]. Weights have a scale per channel, so they do not change. The middle value gets channels
of equal range, and a single scale serves them all (Nagel et al., Data-Free Quantization, 2019; here the
factors come from the observed ranges). MobileNetV2 W8A8: 20.6 -> 22.2 dB. `equalize_sums` does the same for values
that batch norms make and residual additions join, half way, because their readers have one scale for all inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.graph.ops import called_module, inputs_of, module_calls
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.pattern import Match, Pat, Rule
from sparsebit.quantization.modules.activations import QReLU, QReLU6
from sparsebit.quantization.modules.conv import QConv2d, is_depthwise
from sparsebit.quantization.modules.math import QAdd
from sparsebit.quantization.modules.normalization import QBatchNorm2d
from sparsebit.quantization.modules.unary import QIdentity
from sparsebit.quantization.quantizers import Quantizer, build_quantizer

SMALLEST_FACTOR = 2.0**-8  # a channel is stretched at most that far
SIGMAS = 4.0  # how far a channel reaches, by its batch norm

CHAIN = Pat(
    QConv2d,
    Pat((QReLU, QReLU6), Pat(QConv2d, name="conv"), name="act"),
    name="depthwise",
    where=lambda m, node: is_depthwise(m.module("depthwise")),
)


class Equalization:
    """The chain that one depthwise convolution belongs to; its quantizer observes per channel, then folds."""

    def __init__(self, conv: QConv2d, act: Any, depthwise: QConv2d):
        self.conv = conv
        self.act = act
        self.depthwise = depthwise

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
        quantizer.observer.min_val = top.new_zeros(1)
        quantizer.observer.max_val = top.max().reshape(1)
        quantizer.calc_qparams_with_minmax(quantizer.observer.min_val, quantizer.observer.max_val)
        return factor


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
        scheme = "per-channel-affine"
        if old.is_symmetric:
            scheme = "per-channel-symmetric"
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


@dataclass(eq=False)
class Stream:
    """Values whose channels belong together, because they are added: each with its (mean, variance)."""

    values: dict[fx.Node, tuple[Tensor, Tensor]]
    norms: list[QBatchNorm2d]


@graph_pass("equalize_sums", when=lambda cfg: cfg.schedule.equalize, keeps_output=True)
def equalize_sums(gm: fx.GraphModule, ctx: Any = None) -> int:
    """Balance the channels of residual streams; it runs before fuse_bn, because the batch norms know the size of the
    channels.

    Channel c of every value of a stream is divided by the same r[c], in the batch norms that make the values,
    and the convolutions that read them multiply by it. r is the square root of the range: half of the
    differences goes into weights that share one scale over their inputs.
    """
    calls = module_calls(gm)
    done = 0
    for stream in _streams(gm, calls):
        readers = _readers(stream, gm, calls)
        if not readers:
            continue
        tops = [mean.abs() + SIGMAS * variance.sqrt() for _, (mean, variance) in readers]
        top = torch.stack([t / t.max().clamp(min=1e-30) for t in tops]).mean(0)
        factor = top.clamp(min=SMALLEST_FACTOR).sqrt()
        for norm in stream.norms:
            _multiply(norm, "weight", 1 / factor)
            _multiply(norm, "bias", 1 / factor)
        for conv, _ in readers:
            _multiply(conv, "weight", factor.view(1, -1, 1, 1))
        done += 1
    return done


def _streams(gm: fx.GraphModule, calls: Any) -> list[Stream]:
    of: dict[fx.Node, Stream] = {}
    for node in gm.graph.nodes:
        module = called_module(node, gm)
        inputs = inputs_of(node)
        if isinstance(module, QBatchNorm2d):
            if calls[str(node.target)] == 1 and _can_scale(module, inputs[0], gm):
                statistics = (module.bias.detach().double(), module.weight.detach().double() ** 2)
                of[node] = Stream({node: statistics}, [module])
        elif isinstance(module, (QAdd, QIdentity)) and _hands_on(node, inputs, of):
            known = [of[i].values[i] for i in inputs]
            small, large = sorted((of[inputs[0]], of[inputs[-1]]), key=lambda s: len(s.values))
            if small is not large:
                large.values.update(small.values)
                large.norms += small.norms
                of.update(dict.fromkeys(small.values, large))
            large.values[node] = (sum(m for m, _ in known), sum(v for _, v in known))  # type: ignore[assignment]
            of[node] = large
    return list(dict.fromkeys(of.values()))


def _hands_on(node: fx.Node, inputs: list[fx.Node], of: dict[fx.Node, Stream]) -> bool:
    """All it takes are values of streams, of the same channels: no constant, no alpha."""
    only_values = len(node.args) == len(inputs) > 0 and not node.kwargs
    return (
        only_values and all(i in of for i in inputs) and len({len(of[i].values[i][0]) for i in inputs}) == 1
    )


def _can_scale(norm: QBatchNorm2d, source: fx.Node, gm: fx.GraphModule) -> bool:
    """It has separate factors, and the weight that it is folded into has a scale per channel."""
    conv = called_module(source, gm)
    quantizer = getattr(conv, "weight_quantizer", None)
    return norm.affine and (quantizer is None or quantizer.absorbed or quantizer.is_perchannel)


def _readers(
    stream: Stream, gm: fx.GraphModule, calls: Any
) -> list[tuple[QConv2d, tuple[Tensor, Tensor]]] | None:
    """The convolutions that read a stream, each with its input; None if there is another reader."""
    found = []
    for value, statistics in stream.values.items():
        for user in value.users:
            if user in stream.values:
                continue
            conv = called_module(user, gm)
            if not isinstance(conv, QConv2d) or calls[str(user.target)] > 1 or not _wants_balance(conv):
                return None
            found.append((conv, statistics))
    return found


def _wants_balance(conv: QConv2d) -> bool:
    """One scale for all input channels, and weights that can take the differences."""
    a = conv.input_quantizer
    w = conv.weight_quantizer
    free = a is not None and not a.absorbed and not a.is_perchannel
    return free and conv.groups == 1 and w is not None and (w.absorbed or w.is_perchannel)


@torch.no_grad()
def _multiply(module: nn.Module, name: str, factor: Tensor) -> None:
    old = getattr(module, name)  # a new parameter: others may share the old
    setattr(module, name, nn.Parameter((old * factor).to(old.dtype), requires_grad=old.requires_grad))
