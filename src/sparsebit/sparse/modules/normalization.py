"""Legacy: where the original keeps SBatchNorm2d."""

from sparsebit.sparse.modules.norms import SBatchNorm2d

__all__ = ["SBatchNorm2d"]
