"""reuse_memory: if a value has one reader and separate memory, that reader may write into it.

Fresh pages cost more than the arithmetic of a ReLU or of fake quantization (10 x on large tensors), so both work
in place there. It has no visible effect: it works only without grad, and not if a hook watches the value.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from sparsebit.graph.ops import called_module, inputs_of, module_calls, writes_input
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.trace.tracer import forward_owner
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
    """Grant the permissions; they hold only while `gm.meta["running"]` is not empty: inside QuantModel.forward."""
    forget_reuse(gm)
    running = gm.meta.setdefault("running", set())
    calls = module_calls(gm)
    makers: dict[fx.Node, list[nn.Module]] = {}  # value with separate memory -> the modules that wrote it
    changed = 0
    for node in gm.graph.nodes:
        module = called_module(node, gm)
        if module is None or calls[str(node.target)] > 1 or writes_input(node, gm):
            continue  # a permission belongs to one call
        source = node.args[0] if node.args else None
        alone = isinstance(source, fx.Node) and len(source.users) == 1 and inputs_of(node).count(source) == 1
        mine = None
        if alone and isinstance(source, fx.Node):
            mine = makers.get(source)
        if mine and isinstance(module, QuantOpr) and module.input_quantizer is not None and _ours(module):
            module.reuse = module.input_quantizer.reuse = Reuse(running, mine, module)
            node.meta["inplace"] = True
            changed += 1
        if isinstance(module, (QReLU, QReLU6)):
            makers[node] = [*(mine or ()), module]
        elif isinstance(module, PRODUCERS):
            makers[node] = [module]
    return changed


def makers_of(gm: fx.GraphModule) -> list[tuple[str, nn.Module]]:
    """The modules that permissions rely on, by name: if one is replaced, the permissions are void."""
    granted = (m.reuse for m in gm.modules() if isinstance(m, QuantOpr) and m.reuse is not None)
    found = set()
    for reuse in granted:
        for maker in reuse.makers:
            found.add(maker)
    return [(name, module) for name, module in gm.named_children() if module in found]


def forget_reuse(gm: fx.GraphModule) -> None:
    for module in gm.modules():
        if isinstance(module, (QuantOpr, Quantizer)):
            module.reuse = None


def _ours(module: QuantOpr) -> bool:
    """Our own ops and quantizers read their input once; a user's may look at it again after it was rounded."""
    quantizer = type(module.input_quantizer)
    rounds = next(c for c in quantizer.__mro__ if "_forward" in vars(c))
    return all(c.__module__.startswith("sparsebit.") for c in (forward_owner(type(module)), rounds))
