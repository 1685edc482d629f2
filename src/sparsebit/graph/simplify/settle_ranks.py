"""settle_ranks: `x.ndim` and `x.is_floating_point()` become values where the ops in front of them fix these.

A check of such a value that holds is removed. timm's norms begin with `torch._assert(x.ndim == 4, ...)`, and onnx2torch
asks of every division whether it is one of integers. The check is a second reader of the convolution's output, which
would keep a batch norm from being folded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from sparsebit.graph.ops import inputs_of, is_op, name_of, op_of
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.simplify.constant_operands import constant_tensor
from sparsebit.graph.simplify.weighted_forms import KEEP_RANK, rank_of

COMPARE: tuple[Callable[[Any, Any], Any], ...] = (
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
)


LAYERS = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._BatchNorm)  # their results are floats
FLOAT_RESULTS = frozenset(["mean", "sqrt", "rsqrt", "sigmoid", "tanh", "exp", "softmax", "truediv"])
ARITHMETIC = frozenset(
    ["add", "sub", "mul", "div", "multiply", "divide", "pow", "relu", "relu6", "clamp", "reshape", "permute"]
)


@graph_pass("settle_ranks", keeps_output=True)
def settle_ranks(gm: fx.GraphModule, ctx: Any = None) -> int:
    changed = 0
    for node in list(gm.graph.nodes):
        if _reads_rank(node, gm):
            changed += _settle(node, rank_of(node.args[0], gm))
        elif name_of(node) == "is_floating_point" and is_float(inputs_of(node)[0], gm):
            changed += _settle(node, True)
        elif name_of(node) == "as_decided" and node.args[1] is node.args[2] is True:
            gm.graph.erase_node(node)
            changed += 1
        elif node.op == "call_function" and node.target in COMPARE and not node.all_input_nodes:
            changed += _settle(node, node.target(*node.args))
        elif node.op == "call_function" and node.target is torch._assert and node.args[0] is True:
            gm.graph.erase_node(node)
            changed += 1
    return changed


def _reads_rank(node: fx.Node, gm: fx.GraphModule) -> bool:
    op = op_of(node, gm)
    return (op is getattr and node.args[1:] == ("ndim",)) or (op is torch.Tensor.dim and len(node.args) == 1)


def is_float(node: fx.Node, gm: fx.GraphModule, depth: int = 16) -> bool:
    """Is the value known to be a floating-point tensor? Sums and products with one of these are."""
    if constant_tensor(node, gm) is not None or name_of(node) in FLOAT_RESULTS:
        return True
    op = op_of(node, gm)
    if not depth or (isinstance(op, type) and issubclass(op, LAYERS)):
        return bool(depth)
    is_known = name_of(node) in ARITHMETIC or is_op(op, KEEP_RANK)
    return is_known and any(is_float(value, gm, depth - 1) for value in inputs_of(node))


def _settle(node: fx.Node, value: Any) -> int:
    """Give every reader the number itself."""
    if value is None:
        return 0
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: value if n is node else n)
    node.graph.erase_node(node)
    return 1
