"""Moved to sparsebit.graph.trace.tracer."""

from sparsebit.graph.trace.tracer import LeafTracer as LeafTracer
from sparsebit.graph.trace.tracer import forward_owner as forward_owner
