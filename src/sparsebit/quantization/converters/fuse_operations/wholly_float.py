"""wholly_float: a convolution that onnxruntime computes in float anyway has no quantizers (its input and weight).

Its output is read in float, so it has no integer kernel. Rounding its operands costs accuracy and time, and gains
nothing. Where its input comes from an integer kernel the quantizer stays: the op in front needs it.

A convolution in narrow groups is float, too. onnxruntime multiplies group by group. In integers, groups of 4 or 8
channels take 1.5 to 3.6 times as long as in float, and two filters per channel (7 x 7) 11 to 13 times.

So is the first convolution of a network of images, if it has few filters: from 3 channels to 16, integers take 1.3 to
1.8 times as long (224 x 224, with VNNI and with AVX2). The pass needs the example to know the size of the images.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from sparsebit.graph.ops import called_module, inputs_of, module_calls
from sparsebit.graph.passes import graph_pass
from sparsebit.quantization.converters.float_forms import gate_behind
from sparsebit.quantization.converters.fuse_operations.disable_unnecessary_quant import (
    INTEGER_CONVS,
    wants_integer_output,
)
from sparsebit.quantization.converters.fuse_operations.one_grid import PRODUCERS
from sparsebit.quantization.converters.output_grids import CLIPS, OutputGrids
from sparsebit.quantization.layers import as_calls, is_active, moves_values
from sparsebit.quantization.modules import MultipleInputsQuantOpr
from sparsebit.quantization.modules.conv import QConv2d, is_pointwise
from sparsebit.quantization.modules.pool import MaxPool2d

NARROW = 16  # channels of a group
STEM_INPUTS = 4  # at most
STEM_FILTERS = 32  # at most
STEM_PLACES = 64 * 64  # of the output, at least


@graph_pass("wholly_float", when=lambda cfg: cfg.schedule.enabled("wholly_float"), keeps_output=True)
def wholly_float(gm: fx.GraphModule, ctx: Any) -> int:
    config = ctx.config
    if not config.schedule.fuse_bn or not config.a.qadd.enable_quant:
        return 0  # what a batch norm or an addition reads may be integer later, or with another switch
    changed = 0
    calls = module_calls(gm)
    for node in gm.graph.nodes:
        conv: Any = called_module(node, gm)
        if not isinstance(conv, INTEGER_CONVS) or is_pointwise(conv) or calls[str(node.target)] > 1:
            continue
        own = conv.input_quantizer
        weight = conv.weight_quantizer
        if own is None or weight is None or not is_active(weight) or not wants_integer_output(conv, own):
            continue
        if (own.TYPE, weight.TYPE) != ("uniform", "uniform"):
            continue  # these grids are learned
        reads_codes = _gives_codes(inputs_of(node)[0], gm)
        read_in_float = bool(node.users) and OutputGrids(gm).readers(node) is None
        if is_stem(node, conv, gm, ctx.example):
            weight.set_fake_fused()
            for quantizer in gate_behind(node, gm):  # the activation is computed together with it
                quantizer.set_fake_fused()
        elif has_narrow_groups(conv):
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


def is_stem(node: fx.Node, conv: Any, gm: fx.GraphModule, example: Any) -> bool:
    """A convolution with few filters over large images, as they come into the model."""
    source = inputs_of(node)[0]
    few = conv.in_channels <= STEM_INPUTS and conv.out_channels <= STEM_FILTERS and conv.groups == 1
    if not few or example is None or source.op != "placeholder" or not isinstance(conv, QConv2d):
        return False
    placeholders = gm.graph.find_nodes(op="placeholder")
    (call,) = as_calls(gm, [example])
    images = dict(zip((n.target for n in placeholders), call.args)) | call.kwargs
    shape: Any = getattr(images.get(source.target), "shape", ())
    if len(shape) != 4 or max(conv.kernel_size) == 1:
        return False
    steps = conv.stride[0] * conv.stride[1]
    return bool(shape[2] * shape[3] >= STEM_PLACES * steps) and not _is_pooled_later(node, gm)


def _is_pooled_later(node: fx.Node, gm: fx.GraphModule) -> bool:
    """Does a MaxPool read the output, behind more than a clip? Codes would be pooled with the channels in front."""
    seen: set[fx.Node] = set()
    left = [(user, True) for user in node.users]
    while left:
        user, only_clips = left.pop()
        module = called_module(user, gm)
        if user in seen or isinstance(module, INTEGER_CONVS):
            continue
        if isinstance(module, MaxPool2d) and not only_clips:
            return True
        seen.add(user)
        left += [(reader, only_clips and isinstance(module, CLIPS)) for reader in user.users]
    return False


def is_depthwise_one(conv: Any) -> bool:
    """One filter for each channel."""
    return bool(conv.groups == conv.in_channels == conv.out_channels)


def _gives_codes(node: fx.Node, gm: fx.GraphModule) -> bool:
    """Is the producer of the value, directly or behind ops that only move it, integer if its output is quantized?"""
    module: Any = called_module(node, gm)
    if isinstance(module, MultipleInputsQuantOpr):
        return module.input_quantizer_generated
    if isinstance(module, PRODUCERS):
        return not isinstance(module, INTEGER_CONVS) or is_active(module.weight_quantizer)
    if module is None or not node.all_input_nodes or not (moves_values(module) or isinstance(module, CLIPS)):
        return False
    return _gives_codes(node.all_input_nodes[0], gm)
