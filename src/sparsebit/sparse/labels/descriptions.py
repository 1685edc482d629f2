"""Calls that read the shape, type or device of a tensor, and not its values."""

from __future__ import annotations

from torch import fx


def call_name(node: fx.Node) -> str:
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))


SIZES = {"size", "numel", "nelement", "len", "shape"}
DESCRIPTIONS = {
    *SIZES,
    *("dim", "ndim", "ndimension", "dtype", "device", "layout", "is_cuda", "get_device", "requires_grad"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_tensor", "element_size", "itemsize", "type"),
}


def is_description(node: fx.Node) -> bool:
    """Does the node read a property of a tensor, and not its values?"""
    return (node.args[1] if node.target is getattr else call_name(node)) in DESCRIPTIONS
