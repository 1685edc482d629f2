"""Legacy: where the original keeps its tracing helper."""

from sparsebit.quantization.tools.graph_wrapper import fx_symbolic_trace

__all__ = ["fx_symbolic_trace"]
