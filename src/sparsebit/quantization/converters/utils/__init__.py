"""Legacy: subgraph replacement as in the original. New passes are shorter with `sparsebit.graph.Pat` and `Rule`."""

from .subgraph_matching import SubgraphMatcher
from .subgraph_matching_node import InputMatchingType, MatchingNode
from .subgraph_matching_replace_pattern import ReplacePatternBase

__all__ = ["InputMatchingType", "MatchingNode", "ReplacePatternBase", "SubgraphMatcher"]
