"""The meaning of a node of a torch.fx graph: its op, its module, its inputs, its side effects."""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch import fx, nn

from sparsebit.errors import GraphError

F = TypeVar("F", bound=Callable[..., Any])
ADDS = {operator.add, operator.iadd, torch.add, torch.Tensor.add, torch.Tensor.add_}
INPLACE_OPERATORS = {  # `y = x; y += 1; return x` changes x
    getattr(operator, f"i{name}"): getattr(operator, name)
    for name in (
        "add",
        "floordiv",
        "lshift",
        "matmul",
        "mod",
        "mul",
        "pow",
        "rshift",
        "sub",
        "truediv",
        "xor",
    )
}


def module_of(node: fx.Node, gm: nn.Module) -> nn.Module:
    """The module that a `call_module` node calls."""
    if node.op != "call_module":
        raise GraphError(
            f"{node.name}: is a {node.op} of {node.target}, not a module; ask for op_of(node, gm)"
        )
    return gm.get_submodule(str(node.target))


def called_module(node: fx.Node, gm: nn.Module) -> nn.Module | None:
    """The module that a node calls, or None if the node calls a function or a method, or is an input."""
    if node.op != "call_module":
        return None
    return gm.get_submodule(str(node.target))


def op_of(node: fx.Node, gm: fx.GraphModule) -> Any:
    """The op of a node: a module class, a function, an unbound Tensor method, or else `node.op`.

    A method that torch.Tensor does not have stays a string.
    """
    if node.op == "call_module":
        return type(module_of(node, gm))
    if node.op == "call_function":
        return node.target
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), node.target)
    return node.op


def is_op(op: Any, ops: Collection[Any]) -> bool:
    """Is `op` one of `ops`? A class also counts as each of its bases: a user's conv is an nn.Conv2d."""
    return op in ops or (isinstance(op, type) and any(base in ops for base in op.__mro__))


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The inputs that are nodes, in the order of the call: args, then kwargs.

    Lists, tuples, dicts and slices are flattened. Unlike `node.all_input_nodes`, a node that is used twice
    comes twice: `x + x` has two inputs.
    """
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def argument(node: fx.Node, at: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by position or by name."""
    if len(node.args) > at:
        return node.args[at]
    return node.kwargs.get(name, default)


def name_of(node: fx.Node) -> str:
    """The name of the function or method, or the path of the module or tensor; "" if there is none."""
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", "")


def module_calls(gm: fx.GraphModule) -> Counter[str]:
    """How often each module is called. A module that is called twice must not change for one call."""
    return Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_module")


def writes_input(node: fx.Node, gm: nn.Module) -> bool:
    """Does the call write into its first argument? `relu_`, `inplace=True` in any form, `+=`, `x[i] = y`."""
    if node.op == "call_module":
        return getattr(module_of(node, gm), "inplace", False) is True
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target in INPLACE_OPERATORS or node.target in (operator.setitem, operator.delitem):
        return True
    if node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None or _inplace_argument(node):
        return True
    if getattr(node.target, "__module__", "") == "_operator":
        return False  # operator.and_ ends in _ only because `and` is a keyword
    if isinstance(node.target, str):
        name = node.target
    else:
        name = getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _inplace_argument(node: fx.Node) -> bool:
    """`F.relu(x, True)`: the flag by position."""
    if node.op != "call_function" or not any(a is True for a in node.args):
        return False
    try:
        names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    if "inplace" in names:
        at = names.index("inplace")
    else:
        at = len(node.args)
    return at < len(node.args) and node.args[at] is True


def has_effect(node: fx.Node, gm: fx.GraphModule) -> bool:
    """Does the node matter without a reader of its value? Inputs and outputs do, and nodes that write in
    place."""
    return node.is_impure() or writes_input(node, gm)


def bookkeeping(function: F) -> F:
    """Decorator for a function that a graph calls only for its effect, such as a check of an input."""
    fx.node.has_side_effect(function)
    vars(function)["bookkeeping"] = True
    return function


def is_bookkeeping(node: fx.Node) -> bool:
    """Does the node compute no value? It builds an output object, checks an input, or switches gradients.

    Such functions and modules have the attribute `bookkeeping = True`.
    """
    if node.op == "call_function":
        return isinstance(node.target, type) or getattr(node.target, "bookkeeping", False) is True
    owner = node.graph.owning_module
    if node.op != "call_module" or owner is None:
        return False
    return getattr(owner.get_submodule(str(node.target)), "bookkeeping", False) is True
