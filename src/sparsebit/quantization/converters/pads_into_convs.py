"""pads_into_convs: zeros around the input of a convolution are added behind its quantizer, not in front of it.

Zero is a code of every grid, so both orders give the same values. What computes the input then stands right in front of
the quantizer, as integer kernels want it, and the exporter writes the zeros as `pads` of the convolution.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from sparsebit.graph.ops import argument, called_module, module_of
from sparsebit.graph.passes import graph_pass
from sparsebit.quantization.modules.conv import QConv1d, QConv2d, QConv3d
from sparsebit.quantization.modules.float_ops.pad import Pad, padded_with

CONVS = (QConv1d, QConv2d, QConv3d)


@graph_pass("pads_into_convs", keeps_output=True)
def pads_into_convs(gm: fx.GraphModule, ctx: Any) -> int:
    changed = 0
    for node in list(gm.graph.nodes):
        conv: Any = called_module(node, gm)
        pad = None
        if isinstance(conv, CONVS) and len(node.args) == 1:
            pad = node.args[0]
        if not isinstance(pad, fx.Node) or len(pad.users) > 1 or pad.op != "call_module" or node.kwargs:
            continue
        amounts = _amounts(pad, module_of(pad, gm), len(conv.kernel_size))
        if amounts is None:
            continue
        node.args = (pad.args[0],)
        node.kwargs = {"pad": amounts}
        gm.graph.erase_node(pad)
        changed += 1
    return changed


def _amounts(node: fx.Node, module: nn.Module, dims: int) -> Any:
    """The numbers of zeros, last axis first, in the form of F.pad; None: it pads other values or axes, or crops."""
    if not isinstance(module, Pad) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    layer = module.__dict__.get("op") or module._modules.get("op")
    if padded_with(node, layer) != "zeros":
        return None
    amounts: Any = layer.padding if isinstance(layer, nn.Module) else argument(node, 1, "pad")
    is_spatial = isinstance(amounts, (tuple, list)) and len(amounts) <= 2 * dims
    if is_spatial and not any(_is_negative(n) for n in amounts):
        return list(amounts)
    return None


def _is_negative(amount: Any) -> bool:
    """A size that the graph computes is trusted: it belongs to SAME padding."""
    return isinstance(amount, int) and amount < 0
