"""A small pattern language over torch.fx graphs: the pattern reads like the model, last op first.

conv = Pat((nn.Conv2d, nn.Linear), name="conv")
fold = Rule("fold_bn", Pat(nn.BatchNorm2d, conv, name="bn"), fold_bn)      # fold_bn(m: Match) -> fx.Node
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

from torch import fx

from sparsebit.errors import GraphError
from sparsebit.graph.ops import has_effect, inputs_of, is_op, module_of, op_of
from sparsebit.graph.rewrite import erase_unused

log = logging.getLogger("sparsebit")


@dataclass
class Match:
    """A place where a pattern fits: `m["conv"]` is the node of that name, `m.module("conv")` its module."""

    gm: fx.GraphModule
    anchor: fx.Node  # the node that the outermost Pat fits
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    inner: dict[fx.Node, bool] = field(default_factory=dict)  # every node inside the match -> may be shared
    reason: str = ""

    def __getitem__(self, name: str) -> fx.Node:
        if name not in self.nodes:
            raise GraphError(
                f"the pattern has no node named {name!r}; it names {', '.join(self.nodes) or 'none'}"
            )
        return self.nodes[name]

    def __contains__(self, name: str) -> bool:
        return name in self.nodes

    def module(self, name: str) -> Any:  # the pattern decides the class
        return module_of(self[name], self.gm)

    def decline(self, reason: str) -> fx.Node | None:
        """`return m.decline("the weight is shared")` in a rewrite: leave this place without a change, for
        this reason."""
        self.reason = reason
        return None


class Pat:
    """One node of a pattern: the ops it may be (one or a collection; `ANY` for all), then its inputs.

    inputs    one Pat per Node-valued input, in the order of the call: args, then kwargs, lists and tuples
              flattened (`cat([a, b])` has two), constants left out (`x + 1` has one). `...` at the end allows
              more inputs. Without any Pat, the inputs may be anything.
    name      the rewrite finds the node by it; a name that is used twice must be the same node.
    where     `where(match, node) -> bool`, called when the node's inputs have been matched.
    commutes  the inputs may come in any order.
    shared    the value may have readers outside of the match. Otherwise a node below the anchor fits only if all its
              readers are in the match, because a rewrite would remove it. A Pat of ANY without inputs is the rim
              of the match and may always be shared.
    """

    def __init__(
        self,
        ops: Any,
        *inputs: Pat | EllipsisType,
        name: str | None = None,
        where: Callable[[Match, fx.Node], bool] | None = None,
        commutes: bool = False,
        shared: bool = False,
    ):
        # None: any op
        if isinstance(ops, Pat):
            self.ops: Collection[Any] | None = ops.ops
        else:
            self.ops = _as_set(ops)
        self.open_ended = bool(inputs) and inputs[-1] is ...
        self.inputs: list[Pat] = [p for p in inputs if isinstance(p, Pat)]
        if len(self.inputs) + self.open_ended != len(inputs):
            raise GraphError(f"Pat({ops}, ...): inputs are Pat, ANY, or `...` as the last one; got {inputs}")
        self.name = name
        self.where = where
        self.commutes = commutes
        self.shared = shared
        self.is_rim = self.ops is None and not inputs

    def match(self, node: fx.Node, gm: fx.GraphModule) -> Match | None:
        """The first way to fit this pattern with `node` as its last op, or None."""
        if self.ops is not None and not is_op(op_of(node, gm), self.ops):
            return None  # the common case, kept cheap
        for found in self._fit(node, Match(gm, node)):
            users = (user for n, shared in found.inner.items() if not shared for user in n.users)
            if all(user in found.inner for user in users):
                return found
        return None

    def _fit(self, node: fx.Node, m: Match) -> Iterator[Match]:
        """Every way to fit. Each is a separate Match, so a failed try leaves no trace."""
        if self.ops is not None and not is_op(op_of(node, m.gm), self.ops):
            return
        if self.name is not None and m.nodes.get(self.name, node) is not node:
            return
        if self.name is None:
            names = m.nodes
        else:
            names = {**m.nodes, self.name: node}
        inner = m.inner
        if not self.is_rim:
            inner = {**inner, node: self.shared or node is m.anchor or inner.get(node, False)}
        here = Match(m.gm, m.anchor, names, inner)
        actual = inputs_of(node) if self.inputs else []
        if len(actual) < len(self.inputs) or (
            self.inputs and not self.open_ended and len(actual) > len(self.inputs)
        ):
            return
        for found in self._fit_inputs(self.inputs, actual, here):
            if self.where is None or self.where(found, node):
                yield found

    def _fit_inputs(self, pats: list[Pat], actual: list[fx.Node], m: Match) -> Iterator[Match]:
        if not pats:
            yield m
            return
        for i in range(len(actual) if self.commutes else 1):
            rest = actual[:i] + actual[i + 1 :]
            for found in pats[0]._fit(actual[i], m):
                yield from self._fit_inputs(pats[1:], rest, found)


def _as_set(ops: Any) -> Collection[Any] | None:
    if ops is None:
        return None
    if isinstance(ops, (tuple, list, set, frozenset)):
        return frozenset(ops)
    return frozenset((ops,))


ANY = Pat(None)
"""Any node. `Pat(ANY, name="x")` is any node with a name."""


@dataclass(frozen=True)
class Rule:
    """A pattern, and a rewrite for the places where it fits.

    `rewrite(match)` returns the node that takes the anchor's place (the anchor itself if it was changed in
    place), or None to decline, best as `return match.decline("why")`. Matched nodes without readers are
    erased. The caller lints and recompiles: `run_passes` does.
    """

    name: str
    pattern: Pat
    rewrite: Callable[[Match], fx.Node | None]
    # (anchor, reason), last apply
    declined: list[tuple[str, str]] = field(default_factory=list, compare=False)

    def apply(self, gm: fx.GraphModule) -> int:
        """Rewrite every place in one walk along the graph; returns how many places changed.

        Inputs come before their readers, so a chain collapses in one walk. A node that a rewrite created and
        returned is tried at once.
        """
        self.declined.clear()
        todo = list(reversed(gm.graph.nodes))
        known = set(todo)
        changed = 0
        limit = 10 * len(todo) + 100
        while todo:
            node = todo.pop()
            if _gone(node, gm):
                m = None
            else:
                m = self.pattern.match(node, gm)
            new = None if m is None else self._rewrite(m)
            if new is None:
                continue
            changed += 1
            if new not in known:
                new.meta = new.meta or dict(node.meta)
                known.add(new)
                todo.append(new)
            if changed > limit:
                raise GraphError(
                    f"rule {self.name!r} still matches after {limit} rewrites, last at {new.name}: it "
                    f"matches what it creates; add a `where` that excludes its result"
                )
        return changed

    def _rewrite(self, m: Match) -> fx.Node | None:
        users = tuple(m.anchor.users)  # only these move: a new node may use the anchor itself
        new = self.rewrite(m)
        if new is None:
            reason = m.reason or "no reason given"
            self.declined.append((m.anchor.name, reason))
            log.debug("%s: did not change %s: %s", self.name, m.anchor.name, reason)
            return None
        if new is not m.anchor:
            for user in users:
                if user is not new and not user._erased:
                    user.replace_input_with(m.anchor, new)
        erase_unused([n for n in m.inner if n is not new], m.gm)
        return new


def _gone(node: fx.Node, gm: fx.GraphModule) -> bool:
    """Was the node erased by an earlier rewrite, or did it lose all its readers?"""
    return node._erased or (not node.users and not has_effect(node, gm))
