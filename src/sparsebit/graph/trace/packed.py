"""Packed sequences in a trace: torch's functions that make and read them are single calls of the graph.

They read the lengths before torch.fx is asked, so patches.py replaces their code during a trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from sparsebit.errors import TraceError
from sparsebit.graph.ops import argument
from sparsebit.graph.trace.guards import as_many
from sparsebit.graph.trace.proxies import has_proxy

OF_LISTS: tuple[Any, ...] = (rnn.pack_sequence, rnn.pad_sequence)
FUNCTIONS = (rnn.pack_padded_sequence, rnn.pad_packed_sequence, *OF_LISTS)
MAKERS = (rnn.pack_padded_sequence, rnn.pack_sequence, PackedSequence)
# these return another packed sequence
METHODS = ("_replace", "to", "cpu", "cuda", "double", "float", "half", "pin_memory")


@dataclass
class Items:
    """An input that is a list or tuple: `value` has proxies of its items."""

    source: fx.Node
    value: Any
    nodes: list[fx.Node | None]
    counted = False  # the forward asked for its length, a number that the graph cannot follow


def recorded(tracer: Any, target: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Record a call that makes or reads a packed sequence, if it has a proxy among its arguments."""
    if not has_proxy((args, kwargs)):
        return original(*args, **kwargs)
    if target in OF_LISTS:
        first, *rest = args if args else (kwargs.pop("sequences"),)
        args = (_as_given(tracer, first), *rest)
    if target is rnn.pack_padded_sequence:
        if len(args) > 1:
            lengths = args[1]
        else:
            lengths = kwargs.get("lengths")
        if not has_proxy(lengths) and not any(lengths is b for b in tracer.root.buffers()):
            raise TraceError(
                "pack_padded_sequence: the lengths are numbers, and another batch has other lengths; pass them as "
                "a tensor"
            )
    return tracer.create_proxy("call_function", target, args, kwargs)


def _as_given(tracer: Any, sequences: Any) -> Any:
    """A list that is an input of the model, as one value of any length."""
    if not isinstance(sequences, (list, tuple)):
        return sequences
    nodes = []
    for each in sequences:
        nodes.append(each.node if isinstance(each, fx.Proxy) else None)
    return next((tracer.proxy(each.source) for each in tracer.lists if each.nodes == nodes), sequences)


def settle_lists(graph: fx.Graph, lists: list[Items]) -> None:
    """Let the graph refuse lists of another length if it uses the items one by one, because it would ignore
    further items.

    A model that packs sequences has another number of them in every batch, so it is refused at once.
    """
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for items in reversed(lists):  # inner lists come first
        source = items.source
        parts = [user for user in source.users if user.target is operator.getitem]
        for part in parts:
            if not part.users:
                graph.erase_node(part)
        used = items.counted or any(part in source.users for part in parts)
        if used and isinstance(items.value, list) and any(node.target in FUNCTIONS for node in graph.nodes):
            raise TraceError(
                f"forward reads the items of the list {source.target} one by one, and packs or pads "
                f"sequences; pad them outside of the model"
            )
        if used:
            name = str(source.target if source.op == "placeholder" else source).lstrip("*")
            with graph.inserting_after(*last if source.op == "placeholder" else [source]):
                graph.call_function(as_many, (name, source, len(items.nodes)))


def is_packed(node: fx.Node, root: nn.Module) -> bool:
    """Is its value a PackedSequence, as far as the graph shows?"""
    source = _first(node)
    if node.op == "call_method":
        return node.target in METHODS and _is_packed(source)
    if node.op != "call_function" or node.target is not operator.getitem:
        return node.op == "call_function" and node.target in MAKERS
    if node.args[1:] != (0,) or source is None:
        return False
    return isinstance(_layer(source, root), nn.RNNBase) and _is_packed(_first(source))


def _layer(node: fx.Node | None, root: nn.Module) -> nn.Module | None:
    if node is not None and node.op == "call_module":
        return root.get_submodule(str(node.target))
    return None


def _first(node: fx.Node) -> fx.Node | None:
    first = argument(node, 0, "input")
    return first if isinstance(first, fx.Node) else None


def _is_packed(node: fx.Node | None) -> bool:
    return node is not None and bool(node.meta.get("packed"))


def fields_of(node: fx.Node, root: nn.Module) -> int | None:
    """The number of fields of a packed sequence, or of a slice of one: `PackedSequence(y, *x[1:])`.

    Shapes alone do not show three tuples: the results of pad_packed_sequence, of a recurrent layer, and the
    state of an LSTM.
    """
    n = len(PackedSequence._fields)
    state = node.target is operator.getitem and node.args[1] in (1, -1)
    layer = _layer(_first(node) if state else node, root)
    if node.target is rnn.pad_packed_sequence or isinstance(layer, nn.LSTM if state else nn.RNNBase):
        return 2
    if _is_packed(node):
        return n
    if node.target is operator.getitem and isinstance(node.args[1], slice) and _is_packed(_first(node)):
        return len(range(n)[node.args[1]])
    return None


def open_to_pytree() -> None:
    """Register PackedSequence with pytree. Older versions of torch take it for a leaf and miss its tensors."""
    packed = PackedSequence(torch.zeros(1), torch.ones(1))
    if len(pytree.tree_leaves(packed)) == 1:
        pytree.register_pytree_node(
            PackedSequence, lambda p: (list(p), None), lambda parts, _: PackedSequence(*parts)
        )
