"""Attention whose probabilities are multiplied with the values in float (onnxruntime).

A softmax over many keys gives many small probabilities beside a few large ones. One scale of 8 bits makes the small
ones zero. The product in integers is about as fast as in float, so little is lost without it.
"""

from __future__ import annotations

from torch import fx, nn

from sparsebit.graph.ops import called_module, inputs_of, module_of
from sparsebit.quantization.common import Backend
from sparsebit.quantization.converters.float_forms import FloatForm
from sparsebit.quantization.layers import input_carriers, is_active, moves_values
from sparsebit.quantization.modules.activations import QSoftmax
from sparsebit.quantization.modules.composite.attention import QMultiheadAttention
from sparsebit.quantization.modules.matmul import Attention, MatMul
from sparsebit.quantization.modules.unary import Cast, Dropout, QIdentity
from sparsebit.quantization.quantizers import Quantizer

PASS_THROUGH = (Cast, Dropout, QIdentity)


def float_attention(gm: fx.GraphModule) -> list[FloatForm]:
    """Every product of probabilities and values: the quantizers of both."""
    found = []
    for node in gm.graph.nodes:
        module = called_module(node, gm)
        if module is None:
            continue
        quantizers = _of_blocks(module)
        if isinstance(module, Attention):
            quantizers += _of_attention(node, module, gm)
        elif isinstance(module, MatMul):
            quantizers += _of_product(node, gm)
        active = [q for q in dict.fromkeys(quantizers) if q is not None and is_active(q)]
        if active and all(_is_plain(q) for q in active):
            found.append(FloatForm(None, active))
    return found


def _of_blocks(module: nn.Module) -> list[Quantizer | None]:
    """nn.MultiheadAttention, also inside of a transformer layer."""
    blocks = [block for block in module.modules() if isinstance(block, QMultiheadAttention)]
    found: list[Quantizer | None] = []
    for block in blocks:
        for identity in (block.probs, block.value):
            found.append(identity.input_quantizer)
    return found


def _of_attention(node: fx.Node, module: Attention, gm: fx.GraphModule) -> list[Quantizer | None]:
    """F.scaled_dot_product_attention: its third input are the values."""
    inputs = inputs_of(node)
    carried = dict(input_carriers(node, gm))
    value = carried.get(inputs[2]) if len(inputs) > 2 else None
    return [module.probs.input_quantizer, value.input_quantizer if value is not None else None]


def _of_product(node: fx.Node, gm: fx.GraphModule) -> list[Quantizer | None]:
    """`softmax(...) @ value`, written out."""
    inputs = inputs_of(node)
    if not inputs or not _is_softmax(inputs[0], gm):
        return []
    return [identity.input_quantizer for _, identity in input_carriers(node, gm)]


def _is_softmax(node: fx.Node, gm: fx.GraphModule) -> bool:
    """Is the value a softmax, perhaps moved around?"""
    while node.op == "call_module":
        module = module_of(node, gm)
        if isinstance(module, QSoftmax):
            return True
        if not (isinstance(module, PASS_THROUGH) or moves_values(module)) or not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return False


def _is_plain(quantizer: Quantizer) -> bool:
    return quantizer.TYPE == "uniform" and quantizer.bit == 8 and quantizer.backend is Backend.ONNXRUNTIME
