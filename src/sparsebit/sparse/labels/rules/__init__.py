"""How channel labels pass through ops. A file here that registers a rule is enough for an op to be pruned through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsebit.registry import Registry

Rule = Callable[..., Any]
CHANNEL_RULES: Registry[Rule] = Registry("channel rule")


def channel_rule(*sources: Any) -> Callable[[Rule], Rule]:
    """`@channel_rule(torch.cat)` on `rule(walk, node, *args, **kwargs)`: args of the call, tensors as labels.

    It returns the labels of the result, or NotImplemented: then what it reads is fixed, and the report says so.
    """

    def add(rule: Rule) -> Rule:
        CHANNEL_RULES.add(sources, rule)
        return rule

    return add


CHANNEL_RULES.discover(__name__)
