"""functionalize: an op that writes into its input becomes one that makes a new tensor.

Values can then be kept, shared and offloaded. Readers of the input after the write read the new tensor
instead. If another value that may share the memory is read after the write, the op stays in place.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from sparsebit.graph.ops import INPLACE_OPERATORS, argument, module_of, op_of, writes_input
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.trace.tracer import forward_owner

FRESH = frozenset(  # ops whose result has new memory
    {
        *(getattr(nn, f"{kind}{d}d") for d in (1, 2, 3) for kind in ("Conv", "ConvTranspose")),
        nn.modules.batchnorm._BatchNorm,
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
        *(F.softmax, F.gelu, F.silu, F.adaptive_avg_pool2d, F.scaled_dot_product_attention, torch.softmax),
        *(getattr(torch.Tensor, name) for name in ("add", "sub", "mul", "div", "matmul", "softmax")),
        *(torch.add, torch.sub, torch.mul, torch.div, torch.matmul, torch.bmm, torch.cat, torch.stack),
        *INPLACE_OPERATORS.values(),
        *INPLACE_OPERATORS,
        "placeholder",  # a copy of the caller's tensor is better for the caller
    }
)
ALIASING = frozenset(  # ops whose result may be the memory of their first input
    {
        *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Flatten),
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, operator.getitem),
        *(torch.reshape, torch.flatten, torch.transpose, torch.permute, torch.squeeze, torch.unsqueeze),
        *(torch.narrow, torch.chunk, torch.split, torch.unbind),
        *(getattr(torch.Tensor, name) for name in ("view", "reshape", "flatten", "transpose", "permute")),
        *(getattr(torch.Tensor, name) for name in ("squeeze", "unsqueeze", "narrow", "chunk", "split")),
        *(getattr(torch.Tensor, name) for name in ("contiguous", "unbind", "expand")),
    }
)
ALIASING_NAMES = frozenset(["stochastic_depth", "drop_block2d", "drop_block3d"])  # of torchvision, by name


@graph_pass("functionalize", keeps_output=True)
def functionalize(gm: fx.GraphModule, ctx: Any = None) -> int:
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    writers = [node for node in gm.graph.nodes if writes_input(node, gm)]
    # modules with a call that must stay in place, which decides for all their calls
    keep: set[nn.Module] = set()
    while True:
        done = _convertible(gm, writers, keep, order)
        more = {module_of(n, gm) for n in writers if n.op == "call_module" and n not in done} - keep
        if not more:
            break
        keep |= more
    for node in writers:
        if node in done:
            _make_functional(node, gm, order)
    return len(done)


def _convertible(
    gm: fx.GraphModule, writers: list[fx.Node], keep: set[nn.Module], order: dict[fx.Node, int]
) -> set[fx.Node]:
    """The writers whose input has new memory, without an alias that is read later."""
    done: set[fx.Node] = set()
    for node in writers:
        source = _written(node)
        if not isinstance(source, fx.Node) or (node.op == "call_module" and module_of(node, gm) in keep):
            continue
        if _plain_form(node) and _is_only_reader(node, source, gm, done, order):
            done.add(node)
    return done


def _is_only_reader(
    writer: fx.Node, source: fx.Node, gm: fx.GraphModule, done: set[fx.Node], order: dict[fx.Node, int]
) -> bool:
    """Is every value that may share the memory of `source` read before the write, or through `source` itself?"""
    root = source
    while _may_alias(root, gm) and isinstance(root.args[0], fx.Node):
        root = root.args[0]
    if not _is_fresh(root, gm, done):
        return False
    family = [root]  # grows during the loop
    for alias in family:
        for user in alias.users:
            if user is writer or _reads_size(user):
                continue
            if order[user] > order[writer]:
                if alias is not source:
                    return False  # it would read the memory after the write
            elif _may_alias(user, gm):
                family.append(user)
            elif not _is_fresh(user, gm, done):
                return False
    return True


def _reads_size(node: fx.Node) -> bool:
    """`x.shape`, `x.size(0)`: the write does not change it."""
    return node.target in ("size", "dim") or (node.target is getattr and node.args[1:] == ("shape",))


def _may_alias(node: fx.Node, gm: fx.GraphModule) -> bool:
    """May the result of the op be the memory of its first argument?"""
    if not node.args:
        return False
    if node.op == "call_module":
        op = forward_owner(type(module_of(node, gm)))
    else:
        op = op_of(node, gm)
    return op in ALIASING or getattr(op, "__name__", "") in ALIASING_NAMES


def _is_fresh(node: fx.Node, gm: fx.GraphModule, done: set[fx.Node]) -> bool:
    """Has the node's value new memory? A subclass with another forward may return anything."""
    if node in done:
        return True
    if node.op == "call_module":
        op = forward_owner(type(module_of(node, gm)))
    else:
        op = op_of(node, gm)
    return op in FRESH and not writes_input(node, gm)


def _written(node: fx.Node) -> Any:
    """The written value: the first argument, or the one named `input`."""
    return argument(node, 0, "input")


def _plain_form(node: fx.Node) -> Any:
    """The form of the op that makes a new tensor; None if there is none."""
    if node.op == "call_module":
        return "inplace"
    if node.op == "call_method":
        plain = str(node.target).removesuffix("_")
        if hasattr(torch.Tensor, plain):
            return plain
        return None
    if node.target in INPLACE_OPERATORS:
        return INPLACE_OPERATORS[node.target]
    if node.kwargs.get("inplace") is True:
        return "inplace"
    name = getattr(node.target, "__name__", "")
    # torch.relu_, F.elu_
    spaces: tuple[Any, ...] = ()
    if name.endswith("_"):
        spaces = (torch, F)
    own = next((space for space in spaces if getattr(space, name, None) is node.target), None)
    return getattr(own, name.removesuffix("_"), None)


def _make_functional(node: fx.Node, gm: fx.GraphModule, order: dict[fx.Node, int]) -> None:
    plain = _plain_form(node)
    if node.op == "call_module":
        module_of(node, gm).inplace = False  # type: ignore[assignment]
    elif plain == "inplace":
        node.kwargs = {**node.kwargs, "inplace": False}
    else:
        node.target = plain
    source = _written(node)
    assert isinstance(source, fx.Node)
    for user in list(source.users):
        if order[user] > order[node]:
            user.replace_input_with(source, node)
