"""Moved to sparsebit.graph.trace.guards."""

from sparsebit.graph.trace.guards import as_decided as as_decided
from sparsebit.graph.trace.guards import guard_inputs as guard_inputs
