"""Solvers: each finds codes, scales, masks or transformations for one weight matrix."""
