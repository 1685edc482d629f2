"""Indexing, sorting and searching pick values or places: no quantizer."""

from __future__ import annotations

from sparsebit.quantization.modules.base import Mover, define, spelled

Where = define("Where", Mover, *spelled("where"))
Select = define(
    "Select",
    Mover,
    *spelled(
        "select narrow narrow_copy index_select gather take take_along_dim masked_select nonzero argwhere"
    ),
)
Scatter = define(
    "Scatter",
    Mover,
    *spelled("masked_fill masked_scatter scatter scatter_add scatter_reduce index_add index_copy index_fill"),
    *spelled("index_put index_reduce put select_scatter slice_scatter diagonal_scatter as_strided_scatter"),
)
Sort = define(
    "Sort",
    Mover,
    *spelled("sort argsort msort topk unique unique_consecutive searchsorted bucketize unravel_index"),
)
