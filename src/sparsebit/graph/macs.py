"""Moved to sparsebit.graph.run.macs."""

from sparsebit.graph.run.macs import MacCounter as MacCounter
