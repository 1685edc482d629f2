"""Trace: a module of the user becomes the graph that the passes change."""
