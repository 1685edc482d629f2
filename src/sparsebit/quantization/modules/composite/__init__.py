"""Layers that consist of several ops: attention, transformer layers, recurrent networks."""
