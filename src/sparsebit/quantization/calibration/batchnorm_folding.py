"""Folding batch norms of a quantized network: scales are multiplied by what their filters are, so codes stay.

    w' = w * f,  s' = s * |f|,  f = gamma / sqrt(var + eps)

A negative f mirrors the codes. An affine grid mirrors with them; a symmetric one has no mirror of its lowest code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.graph.ops import called_module, module_calls
from sparsebit.graph.passes import GraphPass, run_passes
from sparsebit.numeric import QParams, broadcast, dequantize, quantize_to_int
from sparsebit.quantization.calibration.runner import calibrate_weight
from sparsebit.quantization.converters.fuse_operations.fuse_bn import LAYERS, affine_of, fuse_bn, rank_of
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.modules.linear import QLinear
from sparsebit.quantization.quantizers import Quantizer

log = logging.getLogger("sparsebit")


def fold(gm: fx.GraphModule) -> None:
    """Fold every BatchNorm that can be; the quantized network computes the same codes as before."""
    found = [_Folded(layer, bn) for layer, bn in norm_pairs(gm)]
    run_passes(gm, [GraphPass("fuse_bn", fuse_bn.run)])
    for folded in found:
        if folded.layer.weight is not folded.weight:  # a new one: it was folded
            folded.rescale()


def norm_pairs(gm: fx.GraphModule) -> Iterator[tuple[QuantOpr, Any]]:
    """Layers with a weight, and the BatchNorm that alone reads their output; each called once."""
    calls = module_calls(gm)
    for node in gm.graph.nodes:
        bn = called_module(node, gm)
        if not isinstance(bn, _BatchNorm) or bn.running_var is None or not node.all_input_nodes:
            continue
        source = node.all_input_nodes[0]
        layer = called_module(source, gm)
        once = calls[str(node.target)] == calls[str(source.target)] == len(source.users) == 1
        if not once or not any(isinstance(bn, kind) and isinstance(layer, LAYERS[kind]) for kind in LAYERS):
            continue
        if isinstance(layer, QuantOpr) and (not isinstance(layer, QLinear) or rank_of(source, gm) == 2):
            yield layer, bn


@torch.no_grad()
def mirror_negative_norms(gm: fx.GraphModule) -> None:
    """Filters and norms change their sign where a norm's is negative: the same network, and folding keeps all codes."""
    uses = []
    for m in gm.modules():
        for p in m.parameters(recurse=False):
            uses.append(p)
    for layer, bn in norm_pairs(gm):
        shared = sum(p is layer.weight for p in uses) > 1
        if bn.weight is None or shared or layer.weight_axis or len(layer.weight) != len(bn.weight):
            continue
        for value in (layer.weight, layer.bias, bn.weight, bn.running_mean):
            if value is not None and value is not bn.weight:
                value[bn.weight < 0] *= -1
        bn.weight.abs_()


def override_folded(qmodel: Any) -> None:
    """The config of the present model, so that save() and load() build it again."""
    done = ["SCHEDULE.BN_TUNING", False, "SCHEDULE.FUSE_BN", True, "SCHEDULE.EQUALIZE", False]
    scheme = qmodel.cfg.w.qscheme.replace("per-tensor", "per-channel")  # filters were scaled one by one
    qmodel.cfg = qmodel.cfg.override(*done, "W.QSCHEME", scheme)


class _Folded:
    """A layer before and after a BatchNorm was folded into it."""

    def __init__(self, layer: QuantOpr, bn: Any):
        self.layer = layer
        self.weight = layer.weight
        self.factor = affine_of(bn)[0]
        quantizer = layer.weight_quantizer
        active = quantizer is not None and not quantizer.absorbed and quantizer.calibrated
        self.quantizer: Quantizer | None = quantizer if active else None
        if self.quantizer is None:
            self.steps = None
        else:
            self.steps = steps_of(layer.weight, self.quantizer)

    @torch.no_grad()
    def rescale(self) -> None:
        layer = self.layer
        quantizer = self.quantizer
        factor = self.factor
        if layer.bias_correction is not None:
            layer.bias_correction = layer.bias_correction * factor.to(layer.bias_correction)
        if quantizer is None:
            return
        old = quantizer.current_qparams()
        drop: Any = getattr(quantizer, "drop_transform", None)
        if drop is not None:
            drop()
        if len(old.scale) == 1 < len(factor):
            quantizer.qdesc.is_perchannel = True
        calibrate_weight(layer)  # the range that repr and set_bit() want
        quantizer.observer.reset()
        if len(quantizer.scale) % len(factor):
            log.warning("%s: filters with one scale have several batch norms: rounded again", quantizer.name)
            return
        self._set_grid(quantizer, old)
        self._keep_codes(quantizer)

    def _set_grid(self, quantizer: Quantizer, old: QParams) -> None:
        spec = quantizer.spec
        size = len(quantizer.scale)
        factor = self.factor.repeat_interleave(size // len(self.factor)).to(old.scale.device)
        scale = old.scale * torch.where(factor == 0, 1.0, factor.abs())  # of a filter of zeros any will do
        zero_point = old.zero_point.expand(size)
        if not spec.symmetric:
            zero_point = torch.where(factor < 0, spec.qmin + spec.qmax - zero_point, zero_point)
        quantizer._set_qparams(scale.float(), zero_point)

    def _keep_codes(self, quantizer: Quantizer) -> None:
        """Put weights that would be rounded to another code than before on theirs."""
        layer = self.layer
        spec = quantizer.spec
        grid = quantizer.current_qparams()
        assert self.steps is not None
        want = self.steps * broadcast(self.factor.sign().to(self.steps), self.steps.dim(), layer.weight_axis)
        value = dequantize(want, QParams(grid.scale, torch.zeros_like(grid.scale)), spec).to(layer.weight)
        layer.weight.copy_(torch.where(steps_of(layer.weight, quantizer) == want, layer.weight, value))
        lost = int((steps_of(layer.weight, quantizer) != want).sum())
        if lost:
            log.warning(
                "%s: %d of %d codes could not be kept: a negative batch norm mirrors them, and the grid has no mirror "
                "of its lowest code",
                *(quantizer.name, lost, want.numel()),
            )


@torch.no_grad()
def steps_of(weight: Tensor, quantizer: Quantizer) -> Tensor:
    """The number of steps from zero to which each weight is rounded."""
    grid = quantizer.current_qparams()
    spec = quantizer.spec
    codes = quantize_to_int(quantizer.transform(weight.detach()), grid, spec)
    return dequantize(codes, QParams(torch.ones_like(grid.scale), grid.zero_point), spec)
