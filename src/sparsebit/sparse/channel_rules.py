"""Where a plug-in registers its channel rule; the rules of the library are in labels/rules/."""

from sparsebit.sparse.labels.rules import CHANNEL_RULES, Rule, channel_rule

__all__ = ["CHANNEL_RULES", "Rule", "channel_rule"]
