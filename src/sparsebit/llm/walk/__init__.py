"""Decoder blocks one after the other: calibration data runs through, and every block is solved and stored."""
