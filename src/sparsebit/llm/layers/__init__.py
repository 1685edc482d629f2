"""The layers that run packed weights, and their kernels."""
