"""functionalize: an op that writes into its input becomes one that makes a new tensor.

Values can then be kept, shared and offloaded. Whoever read the input after the write reads the new tensor
instead. Where the input may be a view of, or the same memory as, something else, the op stays as it is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from sparsebit.graph.ops import is_op, module_of, op_of
from sparsebit.graph.passes import graph_pass

OPERATORS = {
    getattr(operator, f"i{name}"): getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "matmul", "pow", "mod")
}
FRESH = frozenset(  # ops whose result is memory of its own
    {
        *(getattr(nn, f"{kind}{d}d") for d in (1, 2, 3) for kind in ("Conv", "ConvTranspose", "BatchNorm")),
        *(getattr(nn, f"{kind}Pool{d}d") for d in (1, 2, 3) for kind in ("Avg", "Max", "AdaptiveAvg")),
        *(nn.Linear, nn.LayerNorm, nn.GroupNorm, nn.Embedding, nn.Upsample),
        *(
            nn.ReLU,
            nn.ReLU6,
            nn.SiLU,
            nn.Hardswish,
            nn.Hardsigmoid,
            nn.LeakyReLU,
            nn.GELU,
            nn.Sigmoid,
            nn.Tanh,
        ),
        *(F.conv1d, F.conv2d, F.conv3d, F.linear, F.interpolate, F.max_pool2d, F.avg_pool2d),
        *(torch.add, torch.sub, torch.mul, torch.div, torch.matmul, torch.bmm, torch.cat, torch.stack),
        *OPERATORS.values(),
        *OPERATORS,
        "placeholder",  # a copy of the caller's tensor is what the caller would want
    }
)


@graph_pass("functionalize", keeps_output=True)
def functionalize(gm: fx.GraphModule, ctx: Any = None) -> int:
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    writers = [node for node in gm.graph.nodes if _writes(node, gm)]
    keep: set[nn.Module] = set()  # modules with a call that must stay in place: for all their calls
    while True:
        done = _convertible(gm, writers, keep)
        more = {module_of(n, gm) for n in writers if n.op == "call_module" and n not in done} - keep
        if not more:
            break
        keep |= more
    for node in writers:
        if node in done:
            _make_functional(node, gm, order)
    return len(done)


def _convertible(gm: fx.GraphModule, writers: list[fx.Node], keep: set[nn.Module]) -> set[fx.Node]:
    """The writers whose input is memory of its own."""
    done: set[fx.Node] = set()
    for node in writers:
        source = node.args[0] if node.args else None
        if (node.op == "call_module" and module_of(node, gm) in keep) or not isinstance(source, fx.Node):
            continue
        if source in done or (is_op(op_of(source, gm), FRESH) and not _writes(source, gm)):
            done.add(node)
    return done


def _writes(node: fx.Node, gm: fx.GraphModule) -> bool:
    if node.op == "call_module":
        return getattr(module_of(node, gm), "inplace", False) is True
    if node.op == "call_function":
        return node.target in OPERATORS or node.kwargs.get("inplace") is True
    return node.op == "call_method" and _plain_method(node) is not None


def _plain_method(node: fx.Node) -> str | None:
    """`relu` for `relu_`."""
    name = str(node.target)
    plain = name.removesuffix("_")
    return plain if plain != name and not name.endswith("__") and hasattr(torch.Tensor, plain) else None


def _make_functional(node: fx.Node, gm: fx.GraphModule, order: dict[fx.Node, int]) -> None:
    if node.op == "call_module":
        module_of(node, gm).inplace = False  # type: ignore[assignment]
    elif node.target in OPERATORS:
        node.target = OPERATORS[node.target]
    elif node.op == "call_method":
        node.target = _plain_method(node) or node.target
    else:
        node.kwargs = {**node.kwargs, "inplace": False}
    source = node.args[0]
    assert isinstance(source, fx.Node)
    for user in list(source.users):
        if order[user] > order[node]:
            user.replace_input_with(source, node)
