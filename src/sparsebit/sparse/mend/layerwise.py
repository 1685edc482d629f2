"""After the choice, layer by layer: fit the layers that read less than before to the outputs of the whole
model.

Least squares over the inputs in the cut model also corrects the errors of earlier layers. A layer whose
output is added to another value is fitted to the sum, so every block corrects the residual stream. Other
layers behind a cut keep their weights, and only their mean is corrected: fitted weights come a little closer,
but train worse (docs/experiments.md). Both models run once, side by side, and stop in front of every such
layer until it is fitted.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from sparsebit.graph.ops import ADDS, called_module, module_calls, op_of
from sparsebit.graph.run.batches import Batches
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.compare import leaves
from sparsebit.graph.run.interpreter import Runner
from sparsebit.sparse.mend.least_squares import Layer, moment, renew, total
from sparsebit.sparse.modules import SparseOpr
from sparsebit.utils.progress import tracked

log = logging.getLogger("sparsebit")

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ROWS = 32  # positions per weight of a filter: far more than there are unknowns
LARGEST = 4608  # weights of a filter: the sums take as many times as many numbers
ROOM = 2**30  # bytes of values that wait; batches beyond it run again for every layer


@dataclass(frozen=True)
class Place:
    """A layer behind a cut, in both graphs, and the node where its share ends: behind a norm, or an addition."""

    layer: Layer
    less: bool  # it reads less than before, and the sums are not too large
    read: fx.Node
    node: fx.Node
    end: fx.Node
    whole_end: fx.Node


@dataclass(frozen=True)
class Sampling:
    """Which positions of a batch enter the sums, and whether a graph may wait in front of a layer."""

    rows: float  # positions per weight of a filter
    draw: torch.Generator
    wait: bool


@torch.no_grad()
def fit(small: fx.GraphModule, whole: fx.GraphModule, calls: Batches, progress: bool | None) -> list[str]:
    """Change the weights of `small`, a graph with masks; returns the layers that were fitted."""
    places = list(_places(small, whole))
    ends = Counter(place.whole_end for place in places)  # places that are still to come
    rows = ROWS / (length_hint(calls.batches) or 16)
    wait = not (small.meta.get("islands") or whole.meta.get("islands"))  # an island may keep state
    sampling = Sampling(rows, torch.Generator().manual_seed(0), wait)
    pairs: list[tuple[_Paused, _Paused]] = []
    fitted = []
    for place in tracked(places, progress, "fitting"):
        sums = None
        used = 0
        ends[place.whole_end] -= 1
        for i, call in enumerate(_again(calls, pairs)):
            if i == len(pairs):
                pairs.append((_Paused(small), _Paused(whole, ends)))
            one, other = pairs[i]
            if call is not None:
                one.start(call)
                other.start(call)
            found = _sums(place, one, other, sampling, i)
            if sums is None or found is None:
                sums = found
            else:
                sums = sums + found
            used += one.size() + other.size()
            if used > ROOM or not wait:
                one.forget()
                other.forget()
        if sums is not None and renew(place.layer, sums):
            fitted.append(str(place.node.target))
    log.info("refit: %d of %d layers behind a cut have new weights", len(fitted), len(places))
    return fitted


def _sums(place: Place, one: _Paused, other: _Paused, sampling: Sampling, batch: int) -> Tensor | None:
    """The sums of one batch; None if the outputs cannot be compared: they have another size, or no batch."""
    layer, norm, *_ = place.layer
    wanted = other.noted_at(place.whole_end)
    one.until(place.node)
    x = one.env[place.read]
    if sampling.wait:
        has = one.ahead(place.end)
    else:
        x = x.clone()
        has = one.onward(place.end)
    if has.shape != wanted.shape or has.shape != one.shapes[place.node]:
        return None
    if x.dim() != layer.weight.dim() and (norm is not None or not isinstance(layer, nn.Linear)):
        return None  # channels are not where weights and norms expect them
    if not place.less:
        return total(place.layer, wanted - has, batch)
    return moment(place.layer, x, wanted - has, sampling.rows, sampling.draw, batch)


def _again(calls: Iterable[Call], pairs: list[tuple[_Paused, _Paused]]) -> Iterator[Call | None]:
    """The batches, if a graph has to start again; otherwise as many Nones."""
    if pairs and all(one.at for one, _ in pairs):
        yield from repeat(None, len(pairs))
        return
    for i, call in enumerate(calls):
        yield None if i < len(pairs) and pairs[i][0].at else call


# -- layers to fit --------------------------------------------------------------------------------------
def _places(small: fx.GraphModule, whole: fx.GraphModule) -> Iterator[Place]:
    once = _called_once(small)
    same = _called_once(whole)
    behind = _behind(small)
    held = Counter(id(p) for _, p in small.named_parameters(remove_duplicate=False))
    alone = {path for path in once if all(held[id(p)] == 1 for p in small.get_submodule(path).parameters())}
    for path, node in once.items():
        layer: Any = small.get_submodule(path)
        read = node.args[0] if node.args else None
        if path not in same or not isinstance(read, fx.Node) or read not in behind:
            continue
        if not _linear(layer) or path not in alone:
            continue
        mask = layer.mask_of("weight")
        reads, makes = (mask.movedim(axis, 0).flatten(1).any(1) for axis in (1, 0))
        if not bool(reads.any()):
            continue
        (norm, adds, end) = _end(node, small, alone)
        (*there, whole_end) = _end(same[path], whole, set(same))
        if [norm, adds] != there:
            norm = ""
            end = node
            whole_end = same[path]
        layers = Layer(layer, small.get_submodule(norm) if norm else None, reads, makes)
        less = not bool(reads.all()) and int(reads.sum()) * layer.weight[0, 0].numel() <= LARGEST
        yield Place(layers, less, read, node, end, whole_end)


def _behind(gm: fx.GraphModule) -> set[fx.Node]:
    """Layers that have lost channels, and all nodes behind them."""
    found = set[fx.Node]()
    for node in gm.graph.nodes:
        module = called_module(node, gm)
        if module is None:
            inside = []
        else:
            inside = [m for m in module.modules() if isinstance(m, SparseOpr)]
        cut = any(not bool(m.mask_of(name).all()) for m in inside for name in m.layer_parameters())
        if cut or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _called_once(gm: fx.GraphModule) -> dict[str, fx.Node]:
    calls = module_calls(gm)
    nodes = {str(node.target): node for node in gm.graph.nodes if node.op == "call_module"}
    return {path: node for path, node in nodes.items() if calls[path] == 1}


def _linear(layer: Any) -> bool:
    """Are its weights used without a change, and is its output a matrix times its input?"""
    if not isinstance(layer, SparseOpr) or not isinstance(layer, (nn.Linear, *CONVOLUTIONS)):
        return False
    stored = "weight" in layer._parameters
    gate = layer.sparser.gate(layer, "weight")
    return stored and gate is None and getattr(layer, "groups", 1) == 1


def _end(node: fx.Node, gm: fx.GraphModule, once: set[str]) -> tuple[str, bool, fx.Node]:
    """The norm behind a layer, whether its output is added, and the last node before another op uses the
    output."""
    norm = ""
    while len(node.users) == 1:
        (user,) = node.users
        module: Any = None
        if user.op == "call_module":
            module = gm.get_submodule(str(user.target))
        if not norm and _renewable(module) and str(user.target) in once:
            norm = str(user.target)
        elif not isinstance(module, (nn.Identity, _DropoutNd)):
            adds = user.op.startswith("call") and op_of(user, gm) in ADDS and not user.kwargs
            adds = adds and len(user.args) == 2 and sum(read is node for read in user.args) == 1
            return norm, adds, user if adds else node
        node = user
    return norm, False, node


def _renewable(norm: Any) -> bool:
    return isinstance(norm, _BatchNorm) and norm.affine and norm.running_mean is not None


# -- runs that wait --------------------------------------------------------------------------------------
class _Paused(Runner):
    """A graph on one batch that stops in front of a node and continues later. It keeps only values that are
    still needed."""

    def __init__(self, gm: fx.GraphModule, wanted: Mapping[fx.Node, int] | None = None):
        super().__init__(gm, garbage_collect_values=True)
        self.nodes = list(gm.graph.nodes)
        self.places = {node: i for i, node in enumerate(self.nodes)}
        # how often each node will be asked for
        self.wanted: Mapping[fx.Node, int] = {}
        if wanted is not None:
            self.wanted = wanted
        self.noted: dict[fx.Node, Tensor] = {}
        self.shapes: dict[fx.Node, Any] = {}
        self.at = 0

    def forget(self) -> None:
        self.at = 0
        self.env = {}
        self.noted = {}
        self.inputs = {}

    def start(self, call: Call) -> None:
        self.forget()
        self.take(call)

    def until(self, stop: fx.Node, past: bool = False) -> None:
        """Run all nodes in front of a node; `past`: and the node."""
        end = self.places[stop] + past
        for node in self.nodes[self.at : end]:
            with torch.no_grad():  # the graph may switch gradients on
                value = self.run_node(node)
            self.env[node] = value = value.detach() if isinstance(value, Tensor) else value
            if node.op == "placeholder":
                self.inputs.pop(str(node.target).lstrip("*"))
            self.shapes[node] = getattr(value, "shape", None)
            if node in self.wanted and (self.wanted[node] or node is stop):
                self.noted[node] = value.clone()  # later nodes may write into it
            for gone in self.user_to_last_uses.get(node, []):
                del self.env[gone]
        self.at = max(self.at, end)

    def noted_at(self, node: fx.Node) -> Tensor:
        if node not in self.noted:
            self.until(node, past=True)
        if self.wanted[node]:
            return self.noted[node]
        return self.noted.pop(node)

    def onward(self, node: fx.Node) -> Tensor:
        self.until(node, past=True)
        value: Tensor = self.env[node]
        return value

    def ahead(self, node: fx.Node) -> Tensor:
        """The value of a later node; the run stays where it is."""
        at = self.at
        env = self.env
        memo = dict[int, Any]()
        self.env = {  # the run may write into these values
            source: value if source.op == "get_attr" else copy.deepcopy(value, memo)
            for source, value in env.items()
        }
        try:
            return self.onward(node)
        finally:
            self.at = at
            self.env = env

    def size(self) -> int:
        values = [v for node, v in self.env.items() if node.op != "get_attr"] + list(self.noted.values())
        return sum(leaf.nbytes for leaf in leaves(values) if isinstance(leaf, Tensor))
