"""wholly_float: a convolution that onnxruntime computes in float anyway has no quantizers (its input and weight).

Its output is read in float, so it has no integer kernel. Rounding its operands costs accuracy and time, and gains
nothing. Where its input comes from an integer kernel the quantizer stays: the op in front needs it.

A convolution in narrow groups is float, too. onnxruntime multiplies group by group. In integers, groups of 4 or 8
channels take 1.5 to 3.6 times as long as in float, and two filters per channel (7 x 7) 11 to 13 times.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from sparsebit.graph.ops import inputs_of, module_calls, module_of
from sparsebit.graph.passes import graph_pass
from sparsebit.quantization.converters.fuse_operations.disable_unnecessary_quant import (
    INTEGER_CONVS,
    wants_integer_output,
)
from sparsebit.quantization.converters.fuse_operations.one_grid import PRODUCERS
from sparsebit.quantization.converters.output_grids import CLIPS, OutputGrids
from sparsebit.quantization.layers import is_active, moves_values
from sparsebit.quantization.modules import MultipleInputsQuantOpr
from sparsebit.quantization.modules.conv import is_pointwise

NARROW = 16  # channels of a group


@graph_pass("wholly_float", when=lambda cfg: cfg.schedule.enabled("wholly_float"), keeps_output=True)
def wholly_float(gm: fx.GraphModule, ctx: Any) -> int:
    config = ctx.config
    if not config.schedule.fuse_bn or not config.a.qadd.enable_quant:
        return 0  # what a batch norm or an addition reads may be integer later, or with another switch
    changed, calls = 0, module_calls(gm)
    for node in gm.graph.nodes:
        conv: Any = module_of(node, gm) if node.op == "call_module" else None
        if not isinstance(conv, INTEGER_CONVS) or is_pointwise(conv) or calls[str(node.target)] > 1:
            continue
        own, weight = conv.input_quantizer, conv.weight_quantizer
        if own is None or weight is None or not is_active(weight) or not wants_integer_output(conv, own):
            continue
        if (own.TYPE, weight.TYPE) != ("uniform", "uniform"):
            continue  # somebody learns these grids
        reads_codes = _gives_codes(inputs_of(node)[0], gm)
        read_in_float = bool(node.users) and OutputGrids(gm).readers(node) is None
        if has_narrow_groups(conv):
            weight.set_fake_fused()
        elif not is_active(own) or not read_in_float or reads_codes:
            continue
        if not reads_codes:
            conv.set_fake_fused()
        changed += 1
    return changed


def has_narrow_groups(conv: Any) -> bool:
    """Several groups of few channels, or several filters for each channel; a depthwise kernel is another one."""
    return conv.groups > 1 and not is_depthwise_one(conv) and conv.in_channels // conv.groups < NARROW


def is_depthwise_one(conv: Any) -> bool:
    """One filter for each channel."""
    return bool(conv.groups == conv.in_channels == conv.out_channels)


def _gives_codes(node: fx.Node, gm: fx.GraphModule) -> bool:
    """Is the value made by an op that is integer if its output is quantized, as it is or moved around?"""
    module: Any = module_of(node, gm) if node.op == "call_module" else None
    if isinstance(module, MultipleInputsQuantOpr):
        return module.input_quantizer_generated
    if isinstance(module, PRODUCERS):
        return not isinstance(module, INTEGER_CONVS) or is_active(module.weight_quantizer)
    if module is None or not node.all_input_nodes or not (moves_values(module) or isinstance(module, CLIPS)):
        return False
    return _gives_codes(node.all_input_nodes[0], gm)
