"""The graph layer: torch.fx only. It knows neither quantization nor pruning."""

from sparsebit.graph.draw import to_mermaid
from sparsebit.graph.ops import has_effect, inputs_of, is_op, module_calls, module_of, op_of
from sparsebit.graph.passes import GraphPass, PassReport, graph_pass, run_passes
from sparsebit.graph.pattern import ANY, Match, Pat, Rule
from sparsebit.graph.rewrite import (
    bypass,
    insert_module_before,
    remove_dead_code,
    remove_unused_modules,
    replace_module,
    replace_modules,
)

__all__ = [
    "ANY",
    "GraphPass",
    "Match",
    "PassReport",
    "Pat",
    "Rule",
    "bypass",
    "graph_pass",
    "has_effect",
    "inputs_of",
    "insert_module_before",
    "is_op",
    "module_calls",
    "module_of",
    "op_of",
    "remove_dead_code",
    "remove_unused_modules",
    "replace_module",
    "replace_modules",
    "run_passes",
    "to_mermaid",
]
