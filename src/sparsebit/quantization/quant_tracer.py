"""QTracer: leaves are torch.nn modules, modules with a registered QModule, and SKIP_TRACE_MODULES."""

from __future__ import annotations

from collections.abc import Sequence

from sparsebit.graph.trace.tracer import LeafTracer
from sparsebit.quantization.modules import is_known


class QTracer(LeafTracer):
    def __init__(self, skipped_module_names: Sequence[str] = (), decides: bool = False):
        super().__init__(skipped_module_names, is_known=is_known, decides=decides)
