"""Units of reconstruction: stretches of the graph that are matched to the float network as a whole.

The graph is cut wherever only one value connects its two sides. A stretch between two cuts that holds several layers,
such as a residual block, is a unit. Layers in a plain row are taken together in threes (an inverted bottleneck without
shortcut). A stretch without cuts that is too long (dense blocks, U-Nets) is divided by layers. A unit may
have several inputs and several outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from sparsebit.graph.ops import called_module, module_of
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.modules.base import is_number

RUN = 3  # layers in a plain row that are taken together
LARGEST = 8  # layers of a block; beyond, it is divided

Learns = Callable[[QuantOpr], bool]


@dataclass(frozen=True, eq=False)
class Unit:
    """Consecutive nodes, those of their layers whose rounding is learned here, the values that enter and leave."""

    nodes: tuple[fx.Node, ...]
    layers: tuple[QuantOpr, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    name: str


def find_units(gm: fx.GraphModule, learns: Learns, kind: str = "block") -> list[Unit]:
    """The units of `gm` in order; nodes between them only hand values on. `kind` is "block" or "layer"."""
    order = list(gm.graph.nodes)
    weighted = {node for node in order if _layers_of(node, gm, learns)}
    if kind == "layer":
        ranges = _single_layers(order, gm, weighted)
    else:
        ranges = _runs(_pieces(order, gm, weighted), gm, weighted)
    done: set[QuantOpr] = set()
    units = []
    for nodes in ranges:
        layers = []
        for node in nodes:
            for m in _layers_of(node, gm, learns):
                if m not in done:
                    layers.append(m)
        layers = list(dict.fromkeys(layers))
        done.update(layers)
        if layers:
            units.append(_unit(nodes, layers, weighted))
    return units


def _layers_of(node: fx.Node, gm: fx.GraphModule, learns: Learns) -> list[QuantOpr]:
    """The layers that a node runs: one, or those inside an island."""
    inside: Iterable[Any] = ()
    if node.op == "call_module":
        inside = module_of(node, gm).modules()
    return [m for m in inside if isinstance(m, QuantOpr) and learns(m)]


def _unit(nodes: Sequence[fx.Node], layers: Sequence[QuantOpr], weighted: set[fx.Node]) -> Unit:
    inside = set(nodes)
    inputs = dict.fromkeys(v for node in nodes for v in node.all_input_nodes if v not in inside)
    behind: set[fx.Node] = set()  # what depends on a layer of this unit
    for node in nodes:
        if node in weighted or behind.intersection(node.all_input_nodes):
            behind.add(node)
    outputs = []
    for n in nodes:
        if n in behind and any(user not in inside for user in n.users):
            outputs.append(n)
    named = [str(n.meta.get("path", n.name)) for n in nodes if n in weighted]
    if len(named) == 1:
        name = named[0]
    else:
        name = f"{named[0]} .. {named[-1]}"
    return Unit(tuple(nodes), tuple(layers), tuple(inputs), tuple(outputs), name)


def _pieces(order: list[fx.Node], gm: fx.GraphModule, weighted: set[fx.Node]) -> list[list[fx.Node]]:
    """The graph, cut wherever at most one value that depends on a layer is still to be read."""
    place = {node: i for i, node in enumerate(order)}
    behind: set[fx.Node] = set()
    pieces: list[list[fx.Node]] = [[]]
    alive: set[fx.Node] = set()
    for i, node in enumerate(order):
        if node.op in ("placeholder", "output"):
            continue
        pieces[-1].append(node)
        if node in weighted or behind.intersection(node.all_input_nodes):
            behind.add(node)
            if not is_number(node, gm):
                alive.add(node)
        alive = {n for n in alive if any(place[user] > i for user in n.users)}
        if len(alive) <= 1:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _runs(pieces: Iterable[list[fx.Node]], gm: fx.GraphModule, weighted: set[fx.Node]) -> list[list[fx.Node]]:
    """Join pieces to units: an absorbed activation belongs to the piece before it, any other piece without a layer to
    the next."""
    ranges: list[list[fx.Node]] = []
    waiting: list[fx.Node] = []
    open_layers = 0  # of the last range, if more layers may join it
    for piece in pieces:
        layers = sum(node in weighted for node in piece)
        if layers == 0:
            if ranges and not waiting and _is_absorbed(piece[0], gm):
                ranges[-1] += piece
            else:
                waiting += piece
        elif layers > LARGEST:
            ranges += _divided(waiting + piece, weighted)
            waiting = []
            open_layers = 0
        elif layers == 1 and 0 < open_layers < RUN:
            ranges[-1] += waiting + piece
            waiting = []
            open_layers += 1
        else:
            ranges.append(waiting + piece)
            waiting = []
            open_layers = 1 if layers == 1 else 0
    return ranges


def _divided(nodes: list[fx.Node], weighted: set[fx.Node]) -> list[list[fx.Node]]:
    """A long stretch in parts of a few layers each."""
    parts: list[list[fx.Node]] = [[]]
    layers = 0
    for node in nodes:
        if node in weighted and layers == RUN:
            parts.append([])
            layers = 0
        layers += node in weighted
        parts[-1].append(node)
    return parts


def _single_layers(order: list[fx.Node], gm: fx.GraphModule, weighted: set[fx.Node]) -> list[list[fx.Node]]:
    """Each layer with the activation that is computed together with it."""
    ranges = []
    for i, node in enumerate(order):
        if node not in weighted:
            continue
        after = order[i + 1]
        fused = after.all_input_nodes == [node] and len(node.users) == 1 and _is_absorbed(after, gm)
        ranges.append([node, after] if fused else [node])
    return ranges


def _is_absorbed(node: fx.Node, gm: fx.GraphModule) -> bool:
    module = called_module(node, gm)
    quantizer = None
    if isinstance(module, QuantOpr):
        quantizer = module.input_quantizer
    return quantizer is not None and quantizer.absorbed
