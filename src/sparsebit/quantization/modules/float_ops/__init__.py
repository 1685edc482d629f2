"""Ops without a quantizer. Each is one row of a table."""
