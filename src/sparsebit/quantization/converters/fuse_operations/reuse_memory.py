"""reuse_memory: where a value has one reader and memory of its own, that reader may write into it.

Fresh pages cost more than the arithmetic of a ReLU or of fake quantization (10 x on large tensors), so both work
in place there. Nobody sees it: without grad only, and not where somebody watches the value with a hook.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from sparsebit.graph.ops import inputs_of, module_of
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.trace import forward_owner
from sparsebit.quantization.modules.activations import QReLU, QReLU6
from sparsebit.quantization.modules.base import QuantOpr
from sparsebit.quantization.modules.conv import QConv2d, QConvTranspose2d
from sparsebit.quantization.modules.linear import QLinear
from sparsebit.quantization.modules.math import QAdd
from sparsebit.quantization.modules.normalization import QBatchNorm1d, QBatchNorm2d, QLayerNorm
from sparsebit.quantization.modules.pool import QAdaptiveAvgPool2d, QAvgPool2d
from sparsebit.quantization.quantizers.base import Quantizer, Reuse

PRODUCERS = (
    *(QConv2d, QConvTranspose2d, QLinear, QBatchNorm1d, QBatchNorm2d, QLayerNorm),
    *(QAvgPool2d, QAdaptiveAvgPool2d, QAdd),
)


@graph_pass("reuse_memory", keeps_output=True)
def reuse_memory(gm: fx.GraphModule, ctx: Any = None) -> int:
    forget_reuse(gm)
    makers: dict[fx.Node, list[nn.Module]] = {}  # value with memory of its own -> the modules that wrote it
    changed = 0
    for node in gm.graph.nodes:
        module = module_of(node, gm) if node.op == "call_module" else None
        source = node.args[0] if node.args else None
        alone = isinstance(source, fx.Node) and len(source.users) == 1 and inputs_of(node).count(source) == 1
        mine = makers.get(source) if alone and isinstance(source, fx.Node) else None
        if mine and isinstance(module, QuantOpr) and module.input_quantizer is not None and _ours(module):
            module.reuse = module.input_quantizer.reuse = Reuse(mine)
            node.meta["inplace"] = True
            changed += 1
        if isinstance(module, (QReLU, QReLU6)) and (mine or not _inplace(module)):
            makers[node] = [*(mine or ()), module]
        elif isinstance(module, PRODUCERS) and not _inplace(module):
            makers[node] = [module]
    return changed


def forget_reuse(gm: fx.GraphModule) -> None:
    for module in gm.modules():
        if isinstance(module, (QuantOpr, Quantizer)):
            module.reuse = None


def _ours(module: nn.Module) -> bool:
    """Our own ops read their input once; a user's op may look at it again after it was quantized."""
    return forward_owner(type(module)).__module__.startswith("sparsebit.")


def _inplace(module: nn.Module) -> bool:
    op = getattr(module, "op", None)
    return op is operator.iadd or getattr(op, "inplace", False) is True
