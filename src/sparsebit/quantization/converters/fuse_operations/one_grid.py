"""one_grid: quantizers that read the same value, directly or behind ops that only move it, get one grid (onnxruntime).

A convolution is integer there only if its output is rounded once, right behind it. So the quantizers behind a max pool,
a slice or a channel shuffle share the range of those that read the value itself. A value that enters a concatenation
and has other readers gets a separate quantizer in front of the concatenation, because the joined value has another
range.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from sparsebit.graph.ops import called_module, inputs_of, module_of
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.rewrite import insert_module_before
from sparsebit.quantization.common import Backend
from sparsebit.quantization.converters.fuse_operations.disable_unnecessary_quant import INTEGER_CONVS, SMOOTH
from sparsebit.quantization.converters.output_grids import CLIPS, OutputGrids, Reader
from sparsebit.quantization.layers import is_active
from sparsebit.quantization.modules.math import QAdd, QMul
from sparsebit.quantization.modules.pool import QAdaptiveAvgPool2d, QAvgPool2d
from sparsebit.quantization.modules.shape import Concat, Stack
from sparsebit.quantization.modules.unary import QIdentity
from sparsebit.quantization.quantizers import Quantizer, build_quantizer

# ops whose integer kernel writes codes: their output wants one grid
PRODUCERS = (*INTEGER_CONVS, *SMOOTH, QAdd, QMul, QAvgPool2d, QAdaptiveAvgPool2d, Concat)


@graph_pass("one_grid", when=lambda cfg: cfg.schedule.enabled("one_grid"), keeps_output=True)
def one_grid(gm: fx.GraphModule, ctx: Any) -> int:
    changed = 0
    # readers first: their grid decides for the values that they read
    for node in reversed(list(gm.graph.nodes)):
        if node.op != "call_module":
            continue
        module = module_of(node, gm)
        if isinstance(module, (Concat, Stack)):
            changed += _quantize_operands(node, gm)
        if isinstance(module, PRODUCERS):
            changed += _quantize_before_clips(node, gm)
            changed += _tie(OutputGrids(gm, all_readers=True).readers(node) or [], gm)
    return changed


def _quantize_operands(join: fx.Node, gm: fx.GraphModule) -> int:
    """A quantizer in front of each operand that has another reader."""
    grids = OutputGrids(gm, all_readers=True)
    readers = grids.readers(join)
    if not readers or not _is_for_onnxruntime(readers):
        return 0
    operands = [x for x in dict.fromkeys(inputs_of(join)) if not _is_quantizer(x, gm)]
    found = [x for x in operands if grids.is_read_elsewhere(x)]
    for i, value in enumerate(found):
        call = insert_quantizer(gm, join, value, f"{join.name}_identity{i}", readers[0].quantizer)
        value.append(call)  # right behind the value: the joins in front of this one read it, too
        for user in list(value.users):
            if user is not call and _joins(user, gm):
                user.replace_input_with(value, call)
    return len(found)


def _quantize_before_clips(node: fx.Node, gm: fx.GraphModule) -> int:
    """If one reader takes the value and another clips it first, round the value itself for both."""
    readers = OutputGrids(gm, all_readers=True).readers(node)
    if not readers or not _is_for_onnxruntime(readers) or len({r.clipped for r in readers}) < 2:
        return 0
    clips = [u for u in node.users if u.op == "call_module" and isinstance(module_of(u, gm), CLIPS)]
    for i, clip in enumerate(clips):
        insert_quantizer(gm, clip, node, f"{clip.name}_before{i}", readers[0].quantizer)
    return len(clips)


def insert_quantizer(
    gm: fx.GraphModule, user: fx.Node, value: fx.Node, name: str, like: Quantizer
) -> fx.Node:
    """A quantizer with the options of `like`, between `value` and `user`."""
    identity = QIdentity()
    identity.training = gm.training
    quantizer = identity.input_quantizer = build_quantizer(like.cfg)
    quantizer.set_backend(like.backend)
    call = insert_module_before(gm, user, value, name, identity)
    call.meta["path"] = f"{user.meta.get('path', user.name)}_identity"
    quantizer.name = f"{call.name}.input_quantizer"
    return call


def _tie(readers: list[Reader], gm: fx.GraphModule) -> int:
    """All of them have one range from now on."""
    if not readers or not _is_for_onnxruntime(readers):
        return 0
    found = list(dict.fromkeys(r.quantizer for r in readers))
    same = len({(r.quantizer.spec, r.clipped) for r in readers}) == 1
    joined = any(_joins(n, gm) for r in readers for n in r.picked)
    if len(found) < 2 or not same or joined or found[0].is_perchannel:
        return 0
    tie = list(dict.fromkeys(q for first in found for q in (first.tied or [first])))
    for quantizer in tie:
        quantizer.tied = tie
    return 1


def _is_for_onnxruntime(readers: Iterable[Reader]) -> bool:
    return all(r.quantizer.backend is Backend.ONNXRUNTIME for r in readers)


def _is_quantizer(node: fx.Node, gm: fx.GraphModule) -> bool:
    module = called_module(node, gm)
    return isinstance(module, QIdentity) and is_active(module.input_quantizer)


def _joins(node: fx.Node, gm: fx.GraphModule) -> bool:
    return node.op == "call_module" and isinstance(module_of(node, gm), (Concat, Stack))
