"""whole_norms: a layer norm that is written out, as in many ONNX files, becomes one nn.LayerNorm.

(x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps) * weight + bias, over the last axis
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.graph.ops import argument, is_bookkeeping, name_of, writes_input
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.rewrite import fresh_name
from sparsebit.graph.simplify.constant_operands import constant_number, constant_tensor

PRODUCTS = ("mul", "multiply")
QUOTIENTS = ("div", "truediv", "divide", "true_divide")


@dataclass
class WrittenNorm:
    """The last node of a norm, the value that it reads, and its constants."""

    end: fx.Node
    source: fx.Node
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None


@graph_pass("whole_norms", keeps_output=True)
def whole_norms(gm: fx.GraphModule, ctx: Any = None) -> int:
    changed = 0
    for node in list(gm.graph.nodes):
        found = None if node._erased else _read(node, gm)
        if found is not None and found.weight is not None:
            _put(found, gm)
            changed += 1
    return changed


def _read(node: fx.Node, gm: fx.GraphModule) -> WrittenNorm | None:
    """The norm whose division is `node`."""
    is_quotient = name_of(node) in QUOTIENTS
    if not (is_quotient or name_of(node) in PRODUCTS) or not _has_two_nodes(node) or writes_input(node, gm):
        return None
    centred, root = _inputs(node)
    if name_of(root) not in (("sqrt", "pow") if is_quotient else ("rsqrt",)):
        return None
    if name_of(root) == "pow" and constant_number(argument(root, 1, "exponent"), gm) != 0.5:
        return None
    inside: Any = root.args[0]
    eps = None
    if _is(inside, "add") and len(inside.args) == 2:
        eps = constant_number(inside.args[1], gm)
    if eps is None:
        return None
    variance = inside.args[0]
    if not _is_mean(variance, gm) or not _is_square(variance.args[0], centred, gm):
        return None
    if not _is(centred, "sub") or not _has_two_nodes(centred):
        return None
    source, mean = _inputs(centred)
    if not _is_mean(mean, gm) or mean.args[0] is not source:
        return None
    found = WrittenNorm(node, source, eps)
    _read_scale(found, gm)
    return found


def _read_scale(found: WrittenNorm, gm: fx.GraphModule) -> None:
    """The product and the sum with constants that follow."""
    product = _only_reader(found.end)
    weight = _other(product, found.end, PRODUCTS, gm)
    if product is None or weight is None or weight.numel() != weight.shape[-1:].numel() or weight.dim() == 0:
        return
    found.end = product
    found.weight = weight.reshape(-1)
    total = _only_reader(product)
    bias = _other(total, product, ("add",), gm)
    if (
        total is not None
        and bias is not None
        and bias.dim()
        and bias.numel() == bias.shape[-1] == found.weight.numel()
    ):
        found.end = total
        found.bias = bias.reshape(-1)


def _put(found: WrittenNorm, gm: fx.GraphModule) -> None:
    assert found.weight is not None
    norm = nn.LayerNorm(found.weight.numel(), found.eps, bias=found.bias is not None)
    with torch.no_grad():
        norm.weight.copy_(found.weight)
        if found.bias is not None:
            norm.bias.copy_(found.bias)
    norm.train(gm.training)
    name = fresh_name(gm, "layer_norm")
    gm.add_submodule(name, norm)
    with gm.graph.inserting_before(found.end):
        new = gm.graph.call_module(name, (found.source,))
    new.meta = dict(found.end.meta)
    found.end.replace_all_uses_with(new)


def _inputs(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _is(node: Any, name: str) -> bool:
    return isinstance(node, fx.Node) and name_of(node) == name


def _has_two_nodes(node: fx.Node) -> bool:
    return len(node.args) == 2 and all(isinstance(value, fx.Node) for value in node.args)


def _is_mean(node: Any, gm: fx.GraphModule) -> bool:
    """Is it a mean over the last axis, with keepdim?"""
    if not _is(node, "mean") or not node.args:
        return False
    axis = argument(node, 1, "dim")
    keeps = argument(node, 2, "keepdim", False)
    return axis in (-1, [-1], (-1,)) and keeps is True


def _is_square(node: Any, of: fx.Node, gm: fx.GraphModule) -> bool:
    if not isinstance(node, fx.Node) or not node.args or node.args[0] is not of:
        return False
    if name_of(node) in PRODUCTS:
        return node.args[1] is of
    is_power = name_of(node) == "pow" and constant_number(argument(node, 1, "exponent"), gm) == 2
    return is_power or name_of(node) == "square"


def _only_reader(node: fx.Node) -> fx.Node | None:
    readers = [user for user in node.users if not is_bookkeeping(user)]
    return readers[0] if len(readers) == 1 else None


def _other(node: fx.Node | None, value: fx.Node, names: tuple[str, ...], gm: fx.GraphModule) -> Tensor | None:
    """The constant that `node` combines `value` with."""
    if node is None or name_of(node) not in names or len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    return constant_tensor(second if first is value else first, gm)
