"""pads_into_convs: zeros around the input of a convolution are added behind its quantizer, not in front of it.

Zero is a code of every grid, so both orders give the same values. What computes the input then stands right in front of
the quantizer, as integer kernels want it, and the exporter writes the zeros as `pads` of the convolution.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from sparsebit.graph.ops import argument, module_of
from sparsebit.graph.passes import graph_pass
from sparsebit.quantization.modules.conv import QConv1d, QConv2d, QConv3d
from sparsebit.quantization.modules.pad import Pad

CONVS = (QConv1d, QConv2d, QConv3d)
ZEROS = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)


@graph_pass("pads_into_convs", keeps_output=True)
def pads_into_convs(gm: fx.GraphModule, ctx: Any) -> int:
    changed = 0
    for node in list(gm.graph.nodes):
        conv: Any = module_of(node, gm) if node.op == "call_module" else None
        pad = node.args[0] if isinstance(conv, CONVS) and len(node.args) == 1 else None
        if not isinstance(pad, fx.Node) or len(pad.users) > 1 or pad.op != "call_module" or node.kwargs:
            continue
        amounts = _amounts(pad, module_of(pad, gm), len(conv.kernel_size))
        if amounts is None:
            continue
        node.args, node.kwargs = (pad.args[0],), {"pad": amounts}
        gm.graph.erase_node(pad)
        changed += 1
    return changed


def _amounts(node: fx.Node, module: nn.Module, dims: int) -> Any:
    """How many zeros, last axis first, as F.pad takes them; None: something else than zeros, or other axes too."""
    if not isinstance(module, Pad) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    layer = module.__dict__.get("op") or module._modules.get("op")
    if isinstance(layer, nn.Module):
        zeros = isinstance(layer, ZEROS) or getattr(layer, "value", None) == 0
        amounts: Any = getattr(layer, "padding", None) if zeros else None
    else:
        zeros = argument(node, 2, "mode", "constant") == "constant" and not argument(node, 3, "value", 0)
        amounts = argument(node, 1, "pad") if zeros else None
    is_spatial = isinstance(amounts, (tuple, list)) and len(amounts) <= 2 * dims
    return list(amounts) if is_spatial else None
