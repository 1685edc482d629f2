"""Reconstruction: the rounding of weights is learned, unit by unit."""
