"""Smooth activations and depthwise convolutions in float, between integer convolutions of 1 x 1 (onnxruntime).

x * sigmoid(x) in integers rounds three times, each time with one scale for all channels. Where channels differ much in
range, that costs many dB. In float there is one rounding left, in front of the next integer convolution. A convolution
of 1 x 1 gives float values at no price (export/onnx/integer_forms.py). A depthwise convolution is about as fast in
float. But float values take more time to move. So calibration measures what both forms do to the outputs of the model.
The float form is taken only where the other one is not good enough, and for a whole bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sparsebit.graph.ops import inputs_of, module_calls, module_of
from sparsebit.graph.run.calls import Call
from sparsebit.quantization.common import Backend
from sparsebit.quantization.converters.fuse_operations.disable_unnecessary_quant import SMOOTH
from sparsebit.quantization.layers import is_active
from sparsebit.quantization.modules import quant_mode
from sparsebit.quantization.modules.activations import QGELU
from sparsebit.quantization.modules.conv import QConv2d, is_depthwise, is_pointwise
from sparsebit.quantization.modules.math import QMul
from sparsebit.quantization.modules.unary import QIdentity
from sparsebit.quantization.quantizers import Mode, Quantizer

log = logging.getLogger("sparsebit")
ACTIVATIONS = (*SMOOTH, QGELU)
A_BIT = 6.0  # dB on the outputs of the model
GOOD_ENOUGH = 20.0  # dB: outputs so close to the float model's stay as they are, and fast
FEW_INPUTS = 16  # channels: on 3, a stem takes 1.6 times as long in integers; up to 16 is an estimate
# from benchmarks/float_forms.py on AVX2 and on VNNI:
PRODUCTS_PER_VALUE = 33  # rounding a value and bringing it into another layout take as long as these save
NOTE = "float_forms"  # in the meta of the graph: what was chosen, for the report


@dataclass
class FloatForm:
    """A convolution, and the quantizers that fall away where it or its activation is computed in float."""

    conv: QConv2d
    quantizers: list[Quantizer]

    def apply(self) -> None:
        for quantizer in self.quantizers:
            quantizer.set_unused()
        if self.conv.weight_quantizer in self.quantizers and self.conv.bias_correction is not None:
            self.conv.drop_correction()


def float_forms(gm: fx.GraphModule) -> list[FloatForm]:
    """Every place where a smooth activation behind, or in front of, a convolution can be computed in float."""
    calls, found = module_calls(gm), []
    for node in gm.graph.nodes:
        conv = _module(node, gm)
        if not isinstance(conv, QConv2d) or calls[str(node.target)] > 1 or not _is_plain(conv):
            continue
        behind, reads_smooth = gate_behind(node, gm), _reads_smooth(node, gm)
        quantizers = behind if is_pointwise(conv) else []
        if _is_better_in_float(conv, reads_smooth) and (behind or (is_depthwise(conv) and reads_smooth)):
            quantizers = [q for q in conv.quantizers() if is_active(q)] + behind
        if quantizers:
            found.append(FloatForm(conv, quantizers))
    return found


def _is_plain(conv: QConv2d) -> bool:
    """8 bits for onnxruntime, on grids that nobody learns."""
    found = [q for q in conv.quantizers() if is_active(q)]
    plain = all(q.TYPE == "uniform" and q.bit == 8 and q.backend is Backend.ONNXRUNTIME for q in found)
    return plain and len(found) == 2


def _is_better_in_float(conv: QConv2d, reads_float: bool) -> bool:
    """Between float values: does an integer kernel save less than rounding and moving its operands take?"""
    if is_depthwise(conv):
        return True
    if not is_pointwise(conv):
        return conv.groups == 1 and conv.in_channels <= FEW_INPUTS
    borders = conv.out_channels + (conv.in_channels if reads_float else 0)
    return conv.in_channels * conv.out_channels < PRODUCTS_PER_VALUE * borders


def gate_behind(node: fx.Node, gm: fx.GraphModule) -> list[Quantizer]:
    """The quantizers of a smooth activation that reads `node`: of its input, and of the factors of x * gate(x)."""
    found: list[Quantizer] = []
    for user in node.users:
        module = _module(user, gm)
        if not isinstance(module, ACTIVATIONS):
            continue
        found += [module.input_quantizer]
        for identity in user.users:
            product = (
                next(iter(identity.users), None) if isinstance(_module(identity, gm), QIdentity) else None
            )
            if product is None or not isinstance(_module(product, gm), QMul):
                continue
            factors = [x for x in inputs_of(product) if isinstance(_module(x, gm), QIdentity)]
            if len(factors) == 2 and {inputs_of(x)[0] for x in factors} == {node, user}:
                found += [_module(x, gm).input_quantizer for x in factors]
    return [q for q in dict.fromkeys(found) if is_active(q)]


def _reads_smooth(node: fx.Node, gm: fx.GraphModule) -> bool:
    source = inputs_of(node)[0]
    if not isinstance(_module(source, gm), QMul):
        return isinstance(_module(source, gm), ACTIVATIONS)
    factors = [inputs_of(x)[0] if isinstance(_module(x, gm), QIdentity) else x for x in inputs_of(source)]
    return any(isinstance(_module(x, gm), ACTIVATIONS) for x in factors)


def _module(node: fx.Node, gm: fx.GraphModule) -> Any:
    return module_of(node, gm) if node.op == "call_module" else None


@torch.no_grad()
def choose_float_forms(gm: fx.GraphModule, calls: Sequence[Call]) -> float:
    """Take the float forms if they bring a bit on the outputs for `calls`; returns how many dB they bring."""
    forms = float_forms(gm)
    if not forms or not calls:
        return 0.0
    wanted = [_outputs(gm, call) for call in calls]
    with quant_mode(gm, w=True, a=True):
        integer = _noise(wanted, [_outputs(gm, call) for call in calls])
        if not integer or -10 * math.log10(integer) > GOOD_ENOUGH:
            return 0.0
        with _off(forms):
            floating = _noise(wanted, [_outputs(gm, call) for call in calls])
    gain = 10 * math.log10(integer / floating) if floating else 0.0
    if gain < A_BIT:
        return gain
    for form in forms:
        form.apply()
    gm.meta[NOTE] = (
        f"the activations of {len(forms)} convolutions, and depthwise convolutions beside them, are computed in float: "
        f"+{gain:.1f} dB on the calibration data. SCHEDULE.FLOAT_FORMS: false keeps them integer, which is faster"
    )
    log.info("%s", gm.meta[NOTE])
    return gain


def _outputs(gm: fx.GraphModule, call: Call) -> list[Tensor]:
    leaves = pytree.tree_leaves(call.run(gm))
    return [x.detach().double() for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _noise(wanted: Sequence[list[Tensor]], found: Sequence[list[Tensor]]) -> float:
    """Geometric mean over the outputs of noise by signal; what is not finite counts for nothing."""
    shares = []
    for output in range(len(wanted[0])):
        noise = signal = 0.0
        for want, got in zip(wanted, found):
            a, b = want[output], got[output]
            if a.shape != b.shape:
                return 0.0
            usable = a.isfinite() & b.isfinite()
            noise += float((a - b)[usable].square().sum())
            signal += float((a - a[usable].mean() if usable.any() else a)[usable].square().sum())
        if noise and signal:
            shares.append(math.log(noise / signal))
    return math.exp(sum(shares) / len(shares)) if shares else 0.0


@contextmanager
def _off(forms: Sequence[FloatForm]) -> Iterator[None]:
    quantizers = [(q, q.mode) for form in forms for q in form.quantizers]
    try:
        for quantizer, _ in quantizers:
            quantizer.mode = Mode.FLOAT
        yield
    finally:
        for quantizer, mode in quantizers:
            quantizer.mode = mode
