"""Convolutions, linear layers and embeddings."""

from __future__ import annotations

from torch import nn

from sparsebit.sparse.modules.base import SparseOpr
from sparsebit.sparse.modules.registry import register_smodule


@register_smodule(sources=[nn.Conv2d])
class SConv2d(SparseOpr, nn.Conv2d):
    pass


@register_smodule(sources=[nn.Conv1d])
class SConv1d(SparseOpr, nn.Conv1d):
    pass


@register_smodule(sources=[nn.Conv3d])
class SConv3d(SparseOpr, nn.Conv3d):
    pass


@register_smodule(sources=[nn.ConvTranspose2d])
class SConvTranspose2d(SparseOpr, nn.ConvTranspose2d):
    pass


@register_smodule(sources=[nn.Linear])
class SLinear(SparseOpr, nn.Linear):
    pass


@register_smodule(sources=[nn.Embedding])
class SEmbedding(SparseOpr, nn.Embedding):
    pass
