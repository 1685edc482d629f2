"""How channel labels pass through ops. A new file here that registers a rule adds an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsebit.registry import Registry

Rule = Callable[..., Any]
CHANNEL_RULES: Registry[Rule] = Registry("channel rule")


def channel_rule(*sources: Any) -> Callable[[Rule], Rule]:
    """`@channel_rule(torch.cat)` on `rule(walk, node, *args, **kwargs)`: the arguments of the call with
    labels for tensors.

    It returns the labels of the result, or NotImplemented. Then all that the node reads is kept, and the
    report names it.
    """

    def add(rule: Rule) -> Rule:
        CHANNEL_RULES.add(sources, rule)
        return rule

    return add


CHANNEL_RULES.discover(__name__)
