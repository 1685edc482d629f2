"""Smooth activations and depthwise convolutions in float, between integer convolutions of 1 x 1 (onnxruntime).

x * sigmoid(x) in integers rounds three times, each time with one scale for all channels. Where channels differ much in
range, that costs many dB. In float there is one rounding left, in front of the next integer convolution. A convolution
of 1 x 1 gives float values at no price (export/onnx/integer_forms.py). A depthwise convolution is about as fast in
float. But float values take more time to move. So calibration measures what both forms do to the outputs of the model.
The float form is taken only where the other one is not good enough, and for a whole bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from sparsebit.graph.ops import inputs_of, module_calls, module_of
from sparsebit.quantization.common import Backend
from sparsebit.quantization.converters.fuse_operations.disable_unnecessary_quant import SMOOTH
from sparsebit.quantization.layers import is_active
from sparsebit.quantization.modules.activations import QGELU
from sparsebit.quantization.modules.conv import QConv2d, is_depthwise, is_pointwise
from sparsebit.quantization.modules.math import QAdd, QMul
from sparsebit.quantization.modules.unary import QIdentity
from sparsebit.quantization.quantizers import Quantizer

ACTIVATIONS = (*SMOOTH, QGELU)
FEW_INPUTS = 16  # channels: on 3, a stem takes 1.6 times as long in integers; up to 16 is an estimate
# from benchmarks/float_forms.py on AVX2 and on VNNI:
PRODUCTS_PER_VALUE = 33  # rounding a value and bringing it into another layout take as long as these save


@dataclass
class FloatForm:
    """Quantizers that fall away together, where an op or a convolution and its activation are computed in float."""

    conv: QConv2d | None
    quantizers: list[Quantizer]

    def apply(self) -> None:
        for quantizer in self.quantizers:
            quantizer.set_unused()
        conv = self.conv
        if conv is not None and conv.weight_quantizer in self.quantizers and conv.bias_correction is not None:
            conv.drop_correction()


def float_forms(gm: fx.GraphModule) -> list[FloatForm]:
    """Every place where a smooth activation behind, or in front of, a convolution can be computed in float."""
    calls = module_calls(gm)
    found = []
    for node in gm.graph.nodes:
        conv = _module(node, gm)
        if not isinstance(conv, QConv2d) or calls[str(node.target)] > 1 or not _is_plain(conv):
            continue
        behind = gate_behind(node, gm)
        reads_smooth = _reads_smooth(node, gm)
        quantizers = behind if is_pointwise(conv) else []
        if _is_better_in_float(conv, reads_smooth) and (behind or (is_depthwise(conv) and reads_smooth)):
            quantizers = [q for q in conv.quantizers() if is_active(q)] + behind
        if quantizers:
            found.append(FloatForm(conv, quantizers))
    return found


def _is_plain(conv: QConv2d) -> bool:
    """8 bits for onnxruntime, on grids that are not learned."""
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
            product = None
            if isinstance(_module(identity, gm), QIdentity):
                product = next(iter(identity.users), None)
            if product is None or not isinstance(_module(product, gm), QMul):
                continue
            factors = [x for x in inputs_of(product) if isinstance(_module(x, gm), QIdentity)]
            if len(factors) == 2 and {inputs_of(x)[0] for x in factors} == {node, user}:
                found += [_module(x, gm).input_quantizer for x in factors]
                found += _constant_behind(product, gm)
        found += _constant_behind(user, gm)
    return [q for q in dict.fromkeys(found) if is_active(q)]


def _constant_behind(node: fx.Node, gm: fx.GraphModule) -> list[Quantizer]:
    """The quantizers of `node + constant`, if nothing else reads `node`."""
    if len(node.users) != 1:
        return []
    identity = next(iter(node.users))
    total = None
    if isinstance(_module(identity, gm), QIdentity):
        total = next(iter(identity.users), None)
    if total is None or _summand(total, gm) is not node:
        return []
    return [_module(x, gm).input_quantizer for x in inputs_of(total) if isinstance(_module(x, gm), QIdentity)]


def _summand(total: fx.Node, gm: fx.GraphModule) -> fx.Node | None:
    """x, if `total` is x + constant."""
    if not isinstance(_module(total, gm), QAdd):
        return None
    inputs = []
    for x in inputs_of(total):
        inputs.append(inputs_of(x)[0] if isinstance(_module(x, gm), QIdentity) else x)
    varying = [x for x in inputs if x.op != "get_attr"]
    return varying[0] if len(varying) == 1 else None


def _reads_smooth(node: fx.Node, gm: fx.GraphModule) -> bool:
    source = inputs_of(node)[0]
    source = _summand(source, gm) or source
    if not isinstance(_module(source, gm), QMul):
        return isinstance(_module(source, gm), ACTIVATIONS)
    factors = []
    for x in inputs_of(source):
        factors.append(inputs_of(x)[0] if isinstance(_module(x, gm), QIdentity) else x)
    return any(isinstance(_module(x, gm), ACTIVATIONS) for x in factors)


def _module(node: fx.Node | None, gm: fx.GraphModule) -> Any:
    if node is not None and node.op == "call_module":
        return module_of(node, gm)
    return None
