"""Legacy: ReplacePatternBase, a pass as a class that finds subgraphs and replaces them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from sparsebit.errors import GraphError
from sparsebit.graph.ops import has_effect
from sparsebit.graph.rewrite import erase_unused

from ..prune import PruneGraph
from .subgraph_matching import JointChecker, Placed, SubgraphMatcher
from .subgraph_matching_node import MatchingNode
from .subgraph_matching_utils import ReplaceStrategy, ReplaceStrategyBase, SubgraphMatchingTimer


class ReplacePatternBase:
    """Override `make_nodes` and `get_new_graph`; `MyPattern().apply(graph_module)` does the rest."""

    def __init__(self) -> None:
        self.nodes = self.make_nodes()
        self.joint_checkers = self.make_joint_checkers()
        self.matching_strategy = self.make_matching_strategy()
        self.timer = SubgraphMatchingTimer()

    def make_nodes(self) -> list[MatchingNode]:
        """The pattern, in topological order."""
        raise NotImplementedError(f"{type(self).__name__} must override make_nodes()")

    def make_joint_checkers(self) -> list[JointChecker]:
        """Conditions over several nodes: [(("cat1", "cat2"), lambda cat1, cat2, modules: ...)]."""
        return []

    def make_matching_strategy(self) -> ReplaceStrategyBase:
        return ReplaceStrategy.APPLY_REPEAT

    def get_new_graph(
        self,
        nodes_dict: dict[str, fx.Node],
        modules_dict: dict[str, nn.Module],
        model: fx.GraphModule,
        transform_idx: int,
    ) -> dict[str, fx.Node]:
        """Build what replaces a match; returns {name of a matched node: the node that takes its place}."""
        raise NotImplementedError(f"{type(self).__name__} must override get_new_graph()")

    def apply(self, m: fx.GraphModule) -> bool:
        """Replace everywhere, repeatedly if the strategy repeats; returns True if anything matched."""
        if not self.matching_strategy.repeat:
            return self.apply_once(m)
        settled: set[tuple[fx.Node, ...]] = set()
        limit = 10 * len(m.graph.nodes) + 100
        for sweep in range(limit):
            if not self._sweep(m, settled):
                PruneGraph().apply(m)
                return sweep > 0
        raise GraphError(
            f"{type(self).__name__} still matches after {limit} sweeps: it matches what it creates; "
            f"add a checker that tells its result from its pattern, or use ReplaceStrategy.APPLY_ONCE"
        )

    def apply_once(self, m: fx.GraphModule) -> bool:
        """Replace the first match only."""
        matched = self._sweep(m, set(), first_only=True)
        PruneGraph().apply(m)
        return matched > 0

    def _sweep(self, m: fx.GraphModule, settled: set[tuple[fx.Node, ...]], first_only: bool = False) -> int:
        """Replace along the graph; every match is found on the graph as the ones before it left it.

        `settled` holds matches that were left standing (a pass that only marks modules): they are done.
        """
        matcher = SubgraphMatcher(self.nodes, self.joint_checkers, self.matching_strategy)
        matched = 0
        for node in list(m.graph.nodes):
            if node._erased or (not node.users and not has_effect(node, m)):
                continue
            fresh = (found for found in matcher.matches_at(node, m) if tuple(found.values()) not in settled)
            placed = next(fresh, None)
            if placed is not None:
                matched += 1
                if not self._replace(m, placed, matcher.modules(placed, m)):
                    settled.add(tuple(placed.values()))
                if first_only:
                    break
        return matched

    def _replace(self, m: fx.GraphModule, placed: Placed, modules: dict[str, Any]) -> bool:
        """Swap in what get_new_graph returns; False if it left every node where it was."""
        users: dict[str, Sequence[fx.Node]] = {name: tuple(node.users) for name, node in placed.items()}
        new = self.get_new_graph(
            nodes_dict=dict(placed), modules_dict=modules, model=m, transform_idx=self.timer.get_idx()
        )
        if isinstance(new, fx.Node):  # the early versions returned the one output
            new = {self.nodes[-1].name: new}
        changed = False
        for name, target in (new or {}).items():
            if name not in placed:
                raise GraphError(
                    f"{type(self).__name__}.get_new_graph: {name!r} is none of {', '.join(placed)}"
                )
            old = placed[name]
            changed |= target is not old
            for user in users[name] if target is not old else ():
                if user is not target and not user._erased:  # nodes made by get_new_graph keep their inputs
                    user.replace_input_with(old, target)
        if changed:
            kept = set(new.values())
            erase_unused([node for node in placed.values() if node not in kept], m)
        return changed
