"""Legacy: passes by their names. `lists` of the original names the tasks to run, built-in ones and those of users."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from torch import fx

from sparsebit.errors import GraphError
from sparsebit.graph.passes import GraphPass


def passes_named(names: Iterable[str], built_in: Sequence[GraphPass], package: str) -> list[GraphPass]:
    """The passes of these names, in this order.

    A name that is not built in is a module: `<package>.<name>`, or `<name>` from anywhere. It defines `ReplacePattern`,
    a ReplacePatternBase, or several of them in the list `ReplacePatterns`.
    """
    known = {step.name: step for step in built_in}
    found: list[GraphPass] = []
    for name in names:
        found.append(known[name] if name in known else _own_pass(name, known, package))
    return found


def _own_pass(name: str, known: Iterable[str], package: str) -> GraphPass:
    module = _find(f"{package}.{name}", name)
    if module is None:
        raise GraphError(
            f"there is no task {name!r}; built in are {', '.join(known)}. "
            f"A task of your own is a module {package}.{name} or {name}, with a class ReplacePattern"
        )
    if not hasattr(module, "ReplacePattern") and not hasattr(module, "ReplacePatterns"):
        raise GraphError(
            f"task {name!r}: {module.__file__} has no ReplacePattern and no list ReplacePatterns"
        )
    if hasattr(module, "ReplacePatterns"):
        patterns = module.ReplacePatterns
    else:
        patterns = [module.ReplacePattern]

    def run(gm: fx.GraphModule, ctx: Any) -> int:
        made = []
        for pattern in patterns:
            made.append(pattern() if isinstance(pattern, type) else pattern)
        return sum(bool(pattern.apply(gm)) for pattern in made)

    return GraphPass(name, run)


def _find(*names: str) -> ModuleType | None:
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, and something that it imports is not
    return None
