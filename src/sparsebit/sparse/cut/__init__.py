"""Masks, and the cut: the graph without the removed channels, checked against the masked one."""
