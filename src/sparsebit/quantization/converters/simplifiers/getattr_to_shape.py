"""Legacy: the pass `getattr_to_shape` of `sparsebit.graph.simplify` as a class."""

from __future__ import annotations

from sparsebit.graph.simplify.getattr_to_shape import getattr_to_shape
from sparsebit.quantization.converters.utils.pass_pattern import PassPattern


class ReplacePattern(PassPattern):
    graph_pass = getattr_to_shape
