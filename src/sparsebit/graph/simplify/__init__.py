"""Passes that bring a traced graph into one form before its ops are looked up; each keeps the output."""

from sparsebit.graph.passes import GraphPass
from sparsebit.graph.simplify.fold_constants import fold_constants
from sparsebit.graph.simplify.functionalize import functionalize
from sparsebit.graph.simplify.functions_to_modules import functions_to_modules
from sparsebit.graph.simplify.getattr_to_shape import getattr_to_shape
from sparsebit.graph.simplify.remove_identity import remove_identity
from sparsebit.graph.simplify.settle_ranks import settle_ranks
from sparsebit.graph.simplify.unbind_getitem_to_subtensor import unbind_getitem_to_subtensor

SIMPLIFIERS: list[GraphPass] = [
    fold_constants,
    functions_to_modules,  # before functionalize, which knows modules best
    settle_ranks,
    remove_identity,  # before functionalize: an identity is its input under another name
    functionalize,
    getattr_to_shape,
    unbind_getitem_to_subtensor,
]

__all__ = ["SIMPLIFIERS"]
