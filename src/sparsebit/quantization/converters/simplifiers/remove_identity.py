"""Legacy: the pass `remove_identity` of `sparsebit.graph.simplify` as a class."""

from __future__ import annotations

from sparsebit.graph.simplify.remove_identity import remove_identity
from sparsebit.quantization.converters.utils.pass_pattern import PassPattern


class ReplacePattern(PassPattern):
    graph_pass = remove_identity
