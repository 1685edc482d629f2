"""Legacy: where the original keeps SLinear."""

from sparsebit.sparse.modules.layers import SLinear

__all__ = ["SLinear"]
