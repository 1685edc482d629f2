"""Legacy: the pass `unbind_getitem_to_subtensor` of `sparsebit.graph.simplify` as a class."""

from __future__ import annotations

from sparsebit.graph.simplify.unbind_getitem_to_subtensor import unbind_getitem_to_subtensor
from sparsebit.quantization.converters.utils.pass_pattern import PassPattern


class ReplacePattern(PassPattern):
    graph_pass = unbind_getitem_to_subtensor
