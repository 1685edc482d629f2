"""A module becomes a graph: torch.fx, with support for code that torch.fx alone does not record."""

from sparsebit.graph.islands import Island
from sparsebit.graph.run.calls import Call
from sparsebit.graph.trace.from_module import SCRIPTED, own_copy, trace, unwrapped
from sparsebit.graph.trace.tracer import LeafTracer, forward_owner

__all__ = ["SCRIPTED", "Call", "Island", "LeafTracer", "forward_owner", "own_copy", "trace", "unwrapped"]
