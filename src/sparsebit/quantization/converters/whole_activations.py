"""whole_activations: an activation that is written out, such as `x * relu6(x + 3) / 6`, becomes one op.

The forward may spell it in many ways, so the spelling is not compared. The part of the graph between one value and
another is computed at some points, and compared with the activations that torch has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.graph.ops import has_effect, inputs_of, is_bookkeeping, module_of, name_of, op_of
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.simplify.constant_operands import constant_number

KNOWN: tuple[tuple[Any, dict[str, Any]], ...] = (
    (F.silu, {}),
    (F.hardswish, {}),
    (F.gelu, {}),
    (F.gelu, {"approximate": "tanh"}),
    (F.mish, {}),
    (F.hardsigmoid, {}),
)
FUNCTIONS = frozenset(
    ["add", "sub", "rsub", "mul", "multiply", "div", "truediv", "neg", "pow", "square", "reciprocal"]
    + ["exp", "log1p", "sigmoid", "logsigmoid", "hardsigmoid", "tanh", "hardtanh", "erf", "softplus"]
    + ["relu", "relu6", "clamp", "clamp_min", "clamp_max", "clip", "minimum", "maximum"]
)
MODULES = (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardsigmoid, nn.LogSigmoid)
POINTS = torch.cat([torch.linspace(-12, 12, 481, dtype=torch.float64), torch.tensor([-40.0, 40.0]).double()])
NEAR = 1e-5  # constants are often written with six digits
MOST = 12  # ops in one activation


@graph_pass("whole_activations", keeps_output=True)
def whole_activations(gm: fx.GraphModule, ctx: Any = None) -> int:
    changed = 0
    for node in list(gm.graph.nodes):
        if not node._erased and node.users and _is_pointwise(node, gm):
            changed += _replace(node, gm)
    return changed


def _replace(last: fx.Node, gm: fx.GraphModule) -> int:
    """Replace what ends in `last`, if it computes an activation of one value."""
    inside = [last]
    while len(inside) <= MOST:
        outside = _outside(inside, gm)
        if len(outside) == 1 and len(inside) > 1:
            found = _activation(inside, outside[0], gm)
            if found is not None:
                _put(last, outside[0], found, gm)
                return 1
        if not outside:
            return 0
        nearest = outside[-1]
        if not _is_pointwise(nearest, gm) or not _is_read_only_by(nearest, inside, gm):
            return 0
        inside.append(nearest)
    return 0


def _outside(inside: list[fx.Node], gm: fx.GraphModule) -> list[fx.Node]:
    """The values that `inside` reads, in the order of the graph; constants do not count."""
    read = set()
    for node in inside:
        for value in inputs_of(node):
            read.add(value)
    varying = [value for value in read if value not in inside and constant_number(value, gm) is None]
    return sorted(varying)


def _is_read_only_by(node: fx.Node, inside: list[fx.Node], gm: fx.GraphModule) -> bool:
    return all(user in inside or is_bookkeeping(user) for user in node.users)


def _is_pointwise(node: fx.Node, gm: fx.GraphModule) -> bool:
    if has_effect(node, gm):
        return False
    if node.op == "call_module":
        return isinstance(module_of(node, gm), MODULES)
    is_torch = node.op == "call_method" or not isinstance(op_of(node, gm), type)
    return node.op in ("call_function", "call_method") and is_torch and name_of(node) in FUNCTIONS


def _activation(
    inside: list[fx.Node], source: fx.Node, gm: fx.GraphModule
) -> tuple[Any, dict[str, Any]] | None:
    found = _values(inside, source, gm)
    if found is None or found.shape != POINTS.shape:
        return None
    for function, options in KNOWN:
        wanted = function(POINTS, **options)
        if bool(((found - wanted).abs() <= NEAR * (1 + wanted.abs())).all()):
            return function, options
    return None


def _values(inside: list[fx.Node], source: fx.Node, gm: fx.GraphModule) -> Tensor | None:
    """What the nodes compute at the points; None where that fails or is not a tensor of doubles."""
    known: dict[fx.Node, Any] = {source: POINTS}
    for node in sorted(inside):
        for value in node.all_input_nodes:
            known.setdefault(value, constant_number(value, gm))
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        try:
            known[node] = _call(node, gm)(*args, **kwargs)
        except (TypeError, ValueError, RuntimeError, ArithmeticError):  # an argument that is not a number
            return None
    last = known[inside[0]]
    if isinstance(last, Tensor) and last.dtype == torch.float64:
        return last
    return None


def _call(node: fx.Node, gm: fx.GraphModule) -> Any:
    if node.op == "call_module":
        return module_of(node, gm)
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target))
    return node.target


def _put(last: fx.Node, source: fx.Node, found: tuple[Any, dict[str, Any]], gm: fx.GraphModule) -> None:
    function, options = found
    with gm.graph.inserting_before(last):
        new = gm.graph.call_function(function, (source,), options)
    new.meta = dict(last.meta)
    last.replace_all_uses_with(new)
