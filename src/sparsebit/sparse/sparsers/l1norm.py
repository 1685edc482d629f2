"""L1 norm: prune what has the smallest absolute values."""

from __future__ import annotations

from sparsebit.sparse.sparsers import Sparser as BaseSparser
from sparsebit.sparse.sparsers import register_sparser


@register_sparser
class L1NormSparser(BaseSparser):
    STRATEGY = "l1norm"


Sparser = L1NormSparser
