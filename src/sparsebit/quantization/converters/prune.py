"""Legacy: PruneGraph removes nodes that do not reach the output; the signature stays (D22)."""

from __future__ import annotations

from torch import fx

from sparsebit.graph.rewrite import remove_dead_code


class PruneGraph:
    """`PruneGraph().apply(m)` erases nodes without an effect on the output, in place, and recompiles."""

    def apply(self, m: fx.GraphModule) -> fx.GraphModule:
        remove_dead_code(m)
        m.graph.lint()
        m.recompile()
        return m
