"""Products of two activations, and attention: whole heads are removed, or the same dimensions of every head
(`heads`)."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from sparsebit.sparse.labels.rules import channel_rule
from sparsebit.sparse.labels.rules.moves import spelled
from sparsebit.sparse.trace.attention import attention_mask

if TYPE_CHECKING:
    from sparsebit.sparse.labels.walk import Walk


@channel_rule(*spelled("matmul bmm"), operator.matmul)
def matmul(walk: Walk, node: fx.Node, a: Tensor, b: Tensor) -> Any:
    if a.dim() < 2 or b.dim() < 2:
        return NotImplemented
    # rows, columns, and the axis of the sum
    a = a.unsqueeze(-2)
    b = b.transpose(-2, -1).unsqueeze(-3)
    return contract(walk, node, a, b, 1)


@channel_rule(torch.einsum)
def einsum(walk: Walk, node: fx.Node, equation: Any, *operands: Any) -> Any:
    """Two operands, every letter once in each."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        tensors = operands[0]
    else:
        tensors = operands
    if not isinstance(equation, str) or "..." in equation or "->" not in equation or len(tensors) != 2:
        return NotImplemented
    left, out = equation.replace(" ", "").split("->")
    names = left.split(",")
    summed = sorted({*left} - {*out, ","})
    if any(len({*name}) != len(name) for name in names) or any(c not in n for c in summed for n in names):
        return NotImplemented
    order = [*out, *summed]
    wide = []
    for name, t in zip(names, tensors):
        t = t.permute([name.index(c) for c in order if c in name])
        for i, c in enumerate(order):
            if c not in name:
                t = t.unsqueeze(i)
        wide.append(t)
    return contract(walk, node, wide[0], wide[1], len(summed))


def contract(walk: Walk, node: fx.Node, a: Tensor, b: Tensor, summed: int) -> Any:
    """Labels of a product of two tensors on the same axes (or axes of size 1). The last `summed` axes are
    summed."""
    labels = walk.labels
    rank = max(a.dim(), b.dim())
    a, b = (x[(None,) * (rank - x.dim())] for x in (a, b))
    both = {d for d in range(rank - summed) if a.shape[d] > 1 and b.shape[d] > 1}
    a, b = torch.broadcast_tensors(a, b)
    inner = range(rank - summed, rank)
    varies = lambda: {*labels.varies(a), *labels.varies(b)}
    if varies() & {*inner}:
        for x in (a, b):
            walk.settle_heads(x, inner)
        if varies() <= {*inner} and len(varies()) == 1:  # both lose the same positions of the sum
            if not _is_zero(walk, node):
                return NotImplemented
            labels.join(a, b)
            return walk.fixed(walk.values[node])
        labels.whole(a, list(inner))
        labels.whole(b, list(inner))
    for axis in reversed(inner):
        a = a.select(axis, 0)
        b = b.select(axis, 0)
    for x, y in ((a, b), (b, a)):
        heads = ({*labels.varies(x)} & both) - {*labels.varies(y)}
        if heads and {*labels.varies(x)} - heads:
            # the other operand keeps all heads: dimensions of heads are removed
            labels.whole(x, sorted(heads))
        elif heads:
            labels.join(x, y)
    in_a = {*labels.varies(a)}
    in_b = {*labels.varies(b)}
    if in_a and in_b:
        if not in_a & in_b:
            return NotImplemented
        labels.whole(a, sorted(in_a - in_b))  # heads whose dimensions are labelled on one side
        labels.whole(b, sorted(in_b - in_a))
        labels.join(a, b)
    return b if in_b else a


def _is_zero(walk: Walk, node: fx.Node) -> bool:
    """Is a factor zero wherever a label is removed? Otherwise the sum would lose a part."""
    return any(n in walk.zero for n in node.all_input_nodes)


@channel_rule(F.scaled_dot_product_attention)
def attention(
    walk: Walk,
    node: fx.Node,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    labels = walk.labels
    qkv = (query, key, value)
    if any(x.dim() - 2 in labels.varies(x) for x in qkv):
        return NotImplemented  # the axis of tokens
    one = all({*labels.varies(x)} <= {x.dim() - 1} for x in qkv)  # one head: its dimensions are removed
    if (one or walk.heads == "dimension") and _is_zero(walk, node):
        labels.join(labels.along(query, -1), labels.along(key, -1))
        return walk.spread(node, labels.along(value, -1), -1)
    for x in qkv:
        labels.whole(x, [-1])
    heads = [x[..., 0, 0] for x in qkv]
    if kwargs.get("enable_gqa"):
        times = query.shape[-3] // key.shape[-3]
        heads[1:] = [h.repeat_interleave(times, -1) for h in heads[1:]]
    if attn_mask is not None and attn_mask.dim() > 2 and attn_mask.shape[-3] > 1:  # a bias for every head
        heads.append(attn_mask[..., 0, 0])
        labels.join(attn_mask, attn_mask[..., :1, :1])
    for other in heads[1:]:
        labels.join(heads[0], other)
    return heads[0][..., None, None].expand(walk.values[node].shape)


@channel_rule(attention_mask)
def mask(walk: Walk, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    """A mask of torch's attention blocks has no channels."""
    if any(isinstance(m, Tensor) and walk.labels.varies(m) for m in args[:2]):
        return NotImplemented
    return walk.fixed(walk.values[node])
