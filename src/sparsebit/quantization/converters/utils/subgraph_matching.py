"""Legacy: SubgraphMatcher finds a pattern of MatchingNodes, which may have several outputs.

The search starts at the pattern's last node and only looks at neighbours (inputs or users) of placed nodes, so that its
cost grows with the graph and not with the pairs of its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from sparsebit.errors import GraphError
from sparsebit.graph.ops import inputs_of, is_op

from .bitpartite_graph_matching import Hungary
from .subgraph_matching_node import InputMatchingType, MatchingNode
from .subgraph_matching_utils import (
    ReplaceStrategy,
    ReplaceStrategyBase,
    get_operators,
    get_operators_type,
)

JointChecker = tuple[Sequence[str], Callable[..., bool]]
Placed = dict[str, fx.Node]


class SubgraphMatcher:
    """Different MatchingNodes match different graph nodes; their values may be used outside of the match.

    matching_nodes     in topological order, connected
    joint_checkers     ((name, ...), f) with `f(node, ..., modules={name: module}) -> bool`
    matching_strategy  kept for the caller
    """

    def __init__(
        self,
        matching_nodes: Sequence[MatchingNode],
        joint_checkers: Sequence[JointChecker] = (),
        matching_strategy: ReplaceStrategyBase = ReplaceStrategy.APPLY_REPEAT,
    ):
        self.matching_nodes = list(matching_nodes)
        self.joint_checkers = list(joint_checkers)
        self.matching_strategy = matching_strategy
        self.pattern = {node.name: node for node in self.matching_nodes}
        self._validate()
        self.order = self._search_order()

    def apply(self, m: fx.GraphModule) -> tuple[Placed, dict[str, Any]] | tuple[None, None]:
        """The first match as ({name: node}, {name: module, function or method}), or (None, None)."""
        for node in m.graph.nodes:
            for placed in self.matches_at(node, m):
                return placed, self.modules(placed, m)
        return None, None

    def matches_at(self, node: fx.Node, m: fx.GraphModule) -> Iterator[Placed]:
        """Every match whose last MatchingNode is `node`."""
        for placed in self._place(0, [node], {}, m):
            yield {name: placed[name] for name in self.pattern}  # in the order of the pattern

    def modules(self, placed: Placed, m: fx.GraphModule) -> dict[str, Any]:
        return dict(zip(placed, get_operators(list(placed.values()), m)))

    def _validate(self) -> None:
        if not self.matching_nodes or len(self.pattern) < len(self.matching_nodes):
            raise GraphError(f"a pattern needs nodes with different names; got {self.matching_nodes}")
        seen: set[str | None] = {None}
        for node in self.matching_nodes:
            late = [name for name in node.inputs if name not in seen]
            if late:
                raise GraphError(
                    f"MatchingNode {node.name}: its inputs {late} must be MatchingNodes before it"
                )
            seen.add(node.name)
        for names, _ in self.joint_checkers:
            unknown = [name for name in names if name not in self.pattern]
            if unknown:
                raise GraphError(f"joint checker of {names}: no MatchingNode is named {unknown}")

    def _search_order(self) -> list[str]:
        """The last node first, then always one that touches an earlier one."""
        order = [self.matching_nodes[-1].name]
        missing = [n.name for n in self.matching_nodes[:-1]]
        while missing:
            near = []
            for name in missing:
                if any(self._touch(name, other) for other in order):
                    near.append(name)
            if not near:
                raise GraphError(
                    f"the pattern is not connected: {missing} do not touch {order}; use two patterns"
                )
            order.append(near[0])
            missing.remove(near[0])
        return order

    def _touch(self, a: str, b: str) -> bool:
        return a in self.pattern[b].inputs or b in self.pattern[a].inputs

    def _place(
        self, step: int, candidates: list[fx.Node], placed: Placed, m: fx.GraphModule
    ) -> Iterator[Placed]:
        name = self.order[step]
        for node in candidates:
            if node in placed.values() or not self._accepts(self.pattern[name], node, m):
                continue
            now = {**placed, name: node}
            if not self._consistent(name, now, m):
                continue
            if step + 1 == len(self.order):
                yield now
            else:
                yield from self._place(step + 1, self._neighbours(self.order[step + 1], now), now, m)

    def _neighbours(self, name: str, placed: Placed) -> list[fx.Node]:
        other = next(other for other in placed if self._touch(name, other))
        node = placed[other]
        if name in self.pattern[other].inputs:
            return node.all_input_nodes
        return list(node.users)

    def _accepts(self, want: MatchingNode, node: fx.Node, m: fx.GraphModule) -> bool:
        if not is_op(get_operators_type([node], m)[0], want.op_type):
            return False
        count = len(want.inputs)
        if want.input_match_type is InputMatchingType.SUBSET:
            enough = count <= len(inputs_of(node))
        else:
            enough = count in (len(node.all_input_nodes), len(inputs_of(node)))
        return enough and want.checker(node, get_operators([node], m)[0])

    def _consistent(self, last: str, placed: Placed, m: fx.GraphModule) -> bool:
        """Every condition that placing `last` made decidable."""
        for want in self.matching_nodes:
            needed = {want.name, *want.inputs} - {None}
            if last in needed and needed <= placed.keys() and not self._inputs_fit(want, placed):
                return False
        for names, check in self.joint_checkers:
            if last in names and placed.keys() >= set(names):
                modules = self.modules({name: placed[name] for name in names}, m)
                if not check(*(placed[name] for name in names), modules=modules):
                    return False
        return True

    def _inputs_fit(self, want: MatchingNode, placed: Placed) -> bool:
        node = placed[want.name]

        def fits(name: str | None, actual: fx.Node) -> bool:
            return name is None or placed[name] is actual

        if want.input_match_type is InputMatchingType.ALL:
            # the original counts a node once however often it is used: `x + x` is both [x] and [x, x]
            return any(
                len(actual) == len(want.inputs) and all(map(fits, want.inputs, actual))
                for actual in (node.all_input_nodes, inputs_of(node))
            )
        inputs = inputs_of(node)
        pairing = Hungary(len(want.inputs), len(inputs))
        for i, name in enumerate(want.inputs):
            for j, actual in enumerate(inputs):
                if fits(name, actual):
                    pairing.add_edge(i, j)
        return pairing.apply() == len(want.inputs)
