"""Legacy: where the original keeps SConv2d."""

from sparsebit.sparse.modules.layers import SConv2d

__all__ = ["SConv2d"]
