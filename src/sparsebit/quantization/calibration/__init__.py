"""Calibration: observers collect the ranges of values, and grids are made from them."""
