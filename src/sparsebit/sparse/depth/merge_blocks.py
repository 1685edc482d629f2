"""Depth for width: two residual blocks in a row become one block with the inner channels of both.

x + f(x) is close to x, so g(x + f(x)) is close to g(x), and least squares on the last layer corrects most of
the rest. This saves no multiplication. But kernels work in blocks of 8 or 16 channels, and every layer has a
fixed cost. Two layers of 16 channels, cut to 8, take the time of two layers of 16; one layer of 32, cut to
16, takes half of its time.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.graph.ops import ADDS, module_calls, module_of, op_of
from sparsebit.graph.run.batches import Batches
from sparsebit.graph.run.calls import Call
from sparsebit.sparse.depth.closeness import errors_of, values_at
from sparsebit.sparse.depth.search import Removal, Wanted, one_by_one
from sparsebit.sparse.depth.shorten_branches import common_path, distinct
from sparsebit.sparse.mend.least_squares import Layer, moment, solve

log = logging.getLogger("sparsebit")

NARROW = 32  # channels: two kernel blocks with AVX-512; half of fewer channels is one block or less
CHOICE = 256  # samples to compare candidates on
ROWS = 16  # positions of a batch per weight of a filter: far more than there are unknowns
ACTIVATIONS: set[Any] = {
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Hardswish, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Identity),
    *(F.relu, F.relu_, F.relu6, F.gelu, F.silu, F.hardswish, F.leaky_relu, F.elu, F.mish),
    *(torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_),
}


@dataclass(frozen=True)
class Block:
    """A convolution, norms and activations, a convolution and perhaps a norm, from `kept` to an addition to
    `kept`."""

    name: str
    kept: fx.Node
    nodes: list[fx.Node]
    add: fx.Node
    forms: list[Any]  # of the nodes: these must be equal in both blocks

    @property
    def last(self) -> int:
        """The index of the second convolution."""
        return len(self.nodes) - (2 if self.forms[-1][0] == "n" else 1)


@dataclass(frozen=True)
class Pair:
    first: Block  # it is merged into the second
    second: Block
    between: list[fx.Node]  # activations, from the addition of the first block to the second
    widths: tuple[int, int]  # inner channels of both
    stream: int  # channels of the value that both are added to

    @property
    def narrow(self) -> bool:
        """Both have few channels, and neither is wider than its input. A block that was merged before is
        wider."""
        return max(self.widths) <= min(NARROW, self.stream)


def merge(
    model: nn.Module,
    example: Any,
    blocks: Wanted,
    batches: Any = None,
    progress: bool | None = None,
) -> nn.Module:
    """A traced module in which some blocks are merged into their next block; its attribute `merged` names
    them.

    blocks     a number: the blocks are chosen on `batches`, pairs of narrow ones (at most 32 channels) first.
               "auto": all narrow pairs. Or the names of the blocks to merge.
    batches    inputs, or (inputs, target). With names and no batches the new layers are not fitted.
    """

    def take(
        whole: fx.GraphModule, small: fx.GraphModule, found: list[Pair], calls: Batches | None
    ) -> tuple[str, fx.GraphModule]:
        return _best(whole, small, _narrowest(found) or found, calls)

    def find(gm: fx.GraphModule, call: Call) -> dict[str, Pair]:
        pairs = find_pairs(gm)
        if blocks == "auto":
            pairs = _leaving_none_out([pair for pair in pairs if pair.narrow])
        return {pair.first.name: pair for pair in pairs}

    if isinstance(blocks, str) and blocks != "auto":
        blocks = [blocks]
    removal = Removal("merge", find, take)
    small, names = one_by_one(removal, model, example, blocks, batches, progress)
    small.merged = names  # type: ignore[assignment]
    return small


def _leaving_none_out(pairs: list[Pair]) -> list[Pair]:
    """The pairs that leave no block alone: every other pair of a row with an even number of blocks."""
    rows: dict[str, list[Pair]] = {}  # by the block that a row ends with
    for pair in pairs:
        rows[pair.second.name] = [*rows.pop(pair.first.name, []), pair]
    return [pair for row in rows.values() for pair in (row[::2] if len(row) % 2 else row)]


def _narrowest(pairs: list[Pair]) -> list[Pair]:
    least = min((sum(pair.widths) for pair in pairs if pair.narrow), default=0)
    return [pair for pair in pairs if pair.narrow and sum(pair.widths) == least]


def _best(
    whole: fx.GraphModule, small: fx.GraphModule, pairs: list[Pair], calls: Batches | None
) -> tuple[str, fx.GraphModule]:
    """The pair whose merge changes the output least, and `small` with it. A few samples are enough to choose."""
    pair = pairs[0]
    if calls is not None and len(pairs) > 1:
        trials = [_merged(small, pair) for pair in pairs]
        _fit(whole, trials, pairs, calls.first(CHOICE))
        error, i = min((error, i) for i, error in enumerate(errors_of(whole, trials, calls.first(CHOICE))))
        pair = pairs[i]
        log.info("merge: %s is merged into %s, error %.3g", pair.first.name, pair.second.name, error)
    merged = _merged(small, pair)
    if calls is not None:
        _fit(whole, [merged], [pair], calls)
    return pair.first.name, merged


# -- what can be merged --------------------------------------------------------------------------------
def find_pairs(gm: fx.GraphModule) -> list[Pair]:
    """Blocks of one form in a row with only activations between them, whose values have no other reader."""
    listed = list(_blocks(gm))
    names = distinct([(block.name, block.add.name) for block in listed])
    blocks = {block.add: replace(block, name=name) for block, name in zip(listed, names)}
    pairs: list[Pair] = []
    for second in blocks.values():
        node = second.kept
        readers = {second.nodes[0], second.add}
        between = list[fx.Node]()
        while set(node.users) == readers and node not in blocks and op_of(node, gm) in ACTIVATIONS:
            between.insert(0, node)
            readers = {node}
            node = node.all_input_nodes[0]
        first = blocks.get(node)
        if first is not None and set(node.users) == readers and first.forms == second.forms:
            one, other = (_first_conv(gm, block) for block in (first, second))
            pairs.append(
                Pair(first, second, between, (one.out_channels, other.out_channels), one.in_channels)
            )
    return pairs


def _blocks(gm: fx.GraphModule) -> Iterator[Block]:
    calls = module_calls(gm)
    for add in gm.graph.nodes:
        if not add.op.startswith("call") or op_of(add, gm) not in ADDS or add.kwargs or len(add.args) != 2:
            continue
        for kept, end in (add.args, add.args[::-1]):
            nodes = _chain(end, kept)
            forms = [_form(node, gm) for node in nodes]
            if re.fullmatch("c[na]*cn?", "".join(form[0] for form in forms)):
                layers = [str(node.target) for node, form in zip(nodes, forms) if form[0] != "a"]
                # its bias is computed
                forms[1:] = [form[:4] if form[0] == "c" else form for form in forms[1:]]
                if all(calls[layer] == 1 for layer in layers):
                    yield Block(common_path(layers), kept, nodes, add, forms)


def _chain(node: Any, kept: Any) -> list[fx.Node]:
    """The nodes from behind `kept` to `node`, if each reads only the node before it and has no other reader."""
    nodes: list[fx.Node] = []
    while isinstance(node, fx.Node) and node is not kept:
        if len(node.users) != 1 or len(node.all_input_nodes) != 1:
            return []
        nodes.insert(0, node)
        node = node.all_input_nodes[0]
    return nodes


def _form(node: fx.Node, gm: fx.GraphModule) -> tuple[Any, ...]:
    op = op_of(node, gm)
    module: Any = None
    if node.op == "call_module":
        module = module_of(node, gm)
    if op is nn.Conv2d and module.groups == 1 and module.stride == (1, 1) and _pads_zeros(module):
        return "c", module.kernel_size, module.padding, module.dilation, module.bias is None
    if op is nn.BatchNorm2d and module.affine and module.track_running_stats:
        return "n", module.eps
    if op in ACTIVATIONS:
        return "a", op, str(module), node.args[1:], node.kwargs
    return ("other",)


def _pads_zeros(conv: nn.Conv2d) -> bool:
    return conv.padding_mode == "zeros" and isinstance(conv.padding, tuple)


# -- the graph -----------------------------------------------------------------------------------------
def _side_by_side(gm: fx.GraphModule, pair: Pair) -> fx.GraphModule:
    """Let both blocks read the input of the first: x + f(x) + g(x). The layers are those of `gm`."""
    graph = copy.deepcopy(gm.graph)
    small = fx.GraphModule(gm, graph)
    nodes = {node.name: node for node in graph.nodes}
    kept = nodes[pair.first.kept.name]
    between = [nodes[node.name] for node in pair.between]
    before = nodes[pair.second.kept.name]
    first = nodes[pair.second.nodes[0].name]
    adds = [nodes[b.add.name] for b in (pair.first, pair.second)]
    for add in adds:  # not in place: two nodes read this value
        add.op = "call_function"
        add.target = torch.add
    first.replace_input_with(before, kept)
    adds[1].replace_input_with(before, adds[0])
    for node in reversed(between):
        graph.erase_node(node)
    graph.lint()
    small.recompile()
    small._tracer_cls = graph._tracer_cls = gm._tracer_cls
    return small


def _merged(gm: fx.GraphModule, pair: Pair) -> fx.GraphModule:
    """Merge the layers of both blocks into the second, which becomes wider."""
    small = _side_by_side(gm, pair)
    nodes = {node.name: node for node in small.graph.nodes}
    one_block = pair.first
    other_block = pair.second
    last = pair.second.last
    add = nodes[one_block.add.name]
    nodes[other_block.add.name].replace_input_with(add, nodes[one_block.kept.name])
    for node in (add, *reversed([nodes[n.name] for n in one_block.nodes])):
        small.graph.erase_node(node)
    for i, (one, other) in enumerate(zip(one_block.nodes, other_block.nodes)):
        if other_block.forms[i][0] != "a" and i <= last:
            wide = _side(module_of(one, gm), module_of(other, gm), 1 if i == last else 0)
            if i == last:  # the constant of its output is fitted: in the norm, if there is one
                normed = last + 1 < len(other_block.nodes)
                zeros = wide.weight.new_zeros(len(wide.weight))
                if normed:
                    wide.bias = None
                else:
                    wide.bias = nn.Parameter(zeros)
            small.set_submodule(str(other.target), wide)
    if last + 1 < len(other_block.nodes):  # it gets other statistics
        norm = other_block.nodes[-1]
        small.set_submodule(str(norm.target), copy.deepcopy(module_of(norm, gm)))
    tracer = gm._tracer_cls
    small = fx.GraphModule(small, small.graph)  # drop the layers that have no call any more
    small._tracer_cls = small.graph._tracer_cls = tracer
    return small


@torch.no_grad()
def _side(one: Any, other: Any, axis: int) -> Any:
    """A layer with the output channels (axis 0) or the input channels (1) of both."""
    wide = copy.deepcopy(other)
    for store in (wide._parameters, wide._buffers):
        for name, value in store.items():
            if isinstance(value, Tensor) and value.ndim > axis:
                both = torch.cat([getattr(one, name), value], axis)
                if store is wide._parameters:
                    store[name] = nn.Parameter(both, value.requires_grad)
                else:
                    store[name] = both
    if isinstance(wide, nn.Conv2d):
        wide.out_channels, wide.in_channels = wide.weight.shape[:2]
    else:
        wide.num_features = len(wide.weight)
    return wide


@torch.no_grad()
def _fit(
    whole: fx.GraphModule, trials: list[fx.GraphModule], pairs: list[Pair], calls: Iterable[Call]
) -> None:
    """Fit the last convolutions by least squares to the missing part of the sum in `whole` behind both
    blocks."""
    moments: list[Any] = [0.0] * len(trials)
    draw = torch.Generator().manual_seed(0)
    for call in calls:
        wanted = values_at(whole, {pair.second.add.name for pair in pairs}, call)
        for i, (trial, pair) in enumerate(zip(trials, pairs)):
            read = pair.second.nodes[pair.second.last - 1].name
            kept = pair.first.kept.name
            seen = values_at(trial, {read, kept}, call)
            lacks = wanted[pair.second.add.name] - seen[kept]
            moments[i] = moments[i] + moment(
                Layer(_last_conv(trial, pair)), seen[read], lacks, ROWS, draw
            ).sum(0)
    for trial, pair, sums in zip(trials, pairs, moments):
        conv = _last_conv(trial, pair)
        norms = (trial.get_submodule(str(node.target)) for node in pair.second.nodes[pair.second.last + 1 :])
        size = float(conv.weight.flatten(1).norm(dim=1).mean())  # the norm of both filters, side by side
        solve(sums, size, Layer(conv, *norms))


def _first_conv(gm: fx.GraphModule, block: Block) -> Any:
    return module_of(block.nodes[0], gm)


def _last_conv(gm: fx.GraphModule, pair: Pair) -> Any:
    return gm.get_submodule(str(pair.second.nodes[pair.second.last].target))
