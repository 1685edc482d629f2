"""Products of two activations, and attention: whole heads go."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from sparsebit.sparse.channel_rules import channel_rule
from sparsebit.sparse.channel_rules.moves import spelled

if TYPE_CHECKING:
    from sparsebit.sparse.channels import Walk


@channel_rule(*spelled("matmul bmm"), operator.matmul)
def matmul(walk: Walk, node: fx.Node, a: Tensor, b: Tensor) -> Any:
    if a.dim() < 2 or b.dim() < 2:
        return NotImplemented
    labels, shape = walk.labels, walk.values[node].shape
    in_a, in_b = labels.varies(a), labels.varies(b)
    if a.dim() - 1 in in_a or b.dim() - 2 in in_b:  # along what is summed up: both lose the same positions
        if {*in_a} - {a.dim() - 1} or {*in_b} - {b.dim() - 2}:  # inside heads: whole heads instead
            a, b = _whole(walk, a, -1), _whole(walk, b, -2)
            in_a, in_b = labels.varies(a), labels.varies(b)
        else:
            labels.join(labels.along(a, -1), labels.along(b, -2))
            return torch.zeros(shape, dtype=torch.long)
    left, right = (
        a[..., :1].expand(*a.shape[:-1], shape[-1]),
        b[..., :1, :].expand(*b.shape[:-2], shape[-2], b.shape[-1]),
    )
    left, right = left.expand(shape), right.expand(shape)
    if not labels.varies(left) or not labels.varies(right):
        return right if labels.varies(right) else left
    if {*labels.varies(left)} != {*labels.varies(right)}:
        return NotImplemented
    labels.join(left, right)
    return left


def _whole(walk: Walk, x: Tensor, axis: int) -> Tensor:
    """Positions of `axis` go together."""
    walk.labels.join(x, x.narrow(axis, 0, 1))
    return x


@channel_rule(F.scaled_dot_product_attention)
def attention(
    walk: Walk, node: fx.Node, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    labels = walk.labels
    for x in (query, key, value):
        _whole(walk, x, -1)
        if {x.dim() - 2} & {*labels.varies(x)}:
            return NotImplemented  # the axis of tokens
    heads = [x[..., 0, 0] for x in (query, key, value)]
    if kwargs.get("enable_gqa"):
        times = query.shape[-3] // key.shape[-3]
        heads[1:] = [h.repeat_interleave(times, -1) for h in heads[1:]]
    for other in heads[1:]:
        labels.join(heads[0], other)
    return heads[0][..., None, None].expand(walk.values[node].shape)
