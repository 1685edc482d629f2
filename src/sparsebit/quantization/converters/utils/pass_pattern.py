"""Legacy: a pass of ours in the class form of the original API, `ReplacePattern().apply(graph_module)`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import fx

from sparsebit.errors import GraphError
from sparsebit.graph.passes import GraphPass, run_passes

from .subgraph_matching_node import MatchingNode
from .subgraph_matching_replace_pattern import ReplacePatternBase


class PassPattern(ReplacePatternBase):
    """Runs one pass. The pass has its own pattern and rewrite; they cannot be changed here."""

    graph_pass: ClassVar[GraphPass]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        changed = {"make_nodes", "make_joint_checkers", "get_new_graph"} & vars(cls).keys()
        if changed:
            raise GraphError(
                f"{cls.__name__} overrides {', '.join(sorted(changed))}, which a built-in pass does not use; "
                f"derive it from ReplacePatternBase instead"
            )

    def make_nodes(self) -> list[MatchingNode]:
        return []

    def apply(self, m: fx.GraphModule) -> bool:
        """Run the pass over the whole graph, also if the schedule switches it off; returns True if anything changed."""
        (report,) = run_passes(m, [replace(self.graph_pass, when=None)])
        return report.changes > 0

    def apply_once(self, m: fx.GraphModule) -> bool:
        """Run `apply`: a pass changes every place in one walk."""
        return self.apply(m)
