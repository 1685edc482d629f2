"""A forward inside decorators (functools.wraps): torch.fx reads the inputs of the innermost and calls the
outermost."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.signature import ANYTHING


def called_as_shown(decorated: Any, inputs: list[Any], example: Call | None) -> Callable[..., Any]:
    """A function (module, *inputs) that calls a `decorated` forward in the way of the example.

    A decorator may distinguish arguments by position, by name, and missing ones. `inputs` are proxies in the
    order of the signature.
    """
    names = [str(proxy.node.target).lstrip("*") for proxy in inputs]
    takes = list(inspect.signature(decorated).parameters.values())[1:]  # without self
    fixed = [p.name for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    more = {p.kind: p.name for p in takes if p.kind in ANYTHING}
    needed = [p.name for p in takes if p.default is p.empty and p.kind not in ANYTHING]
    if example is None:
        count = len([name for name in needed if name in fixed])
    else:
        count = len(example[0])
    if example is None:
        by_name = [name for name in needed if name not in fixed]
    else:
        by_name = list(example[1])

    def call(module: nn.Module, *values: Any) -> Any:
        given = dict(zip(names, values))
        rest = given.get(more.get(inspect.Parameter.VAR_KEYWORD, ""), {})
        args = [given[name] for name in fixed[:count]]
        if count > len(fixed):
            args += given[more[inspect.Parameter.VAR_POSITIONAL]]
        return decorated(module, *args, **{name: given.get(name, rest.get(name)) for name in by_name})

    return call
