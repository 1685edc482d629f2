"""A pass is a named function (gm, ctx) -> number of changed places; `run_passes` runs a list of them.

After every pass, dead code is erased, the graph is linted and recompiled once, and name, changes and
milliseconds are logged. In checked mode the float output before and after a `keeps_output` pass must agree.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sparsebit.errors import GraphError
from sparsebit.graph.rewrite import remove_dead_code, remove_unused_modules
from sparsebit.graph.run.modes import evaluating

log = logging.getLogger("sparsebit")

# float32 sums in another order, and nothing more
RTOL = 1e-4
ATOL = 1e-5


@dataclass(frozen=True)
class GraphPass:
    """One named step of a pipeline; calling it runs the bare function."""

    name: str
    run: Callable[[fx.GraphModule, Any], int]
    when: Callable[[Any], bool] | None = None  # gets ctx.config
    keeps_output: bool = False

    def __call__(self, gm: fx.GraphModule, ctx: Any = None) -> int:
        return self.run(gm, ctx)


@dataclass(frozen=True)
class PassReport:
    """The result of one pass."""

    name: str
    changes: int = 0
    ms: float = 0.0
    skipped: bool = False


def graph_pass(
    name: str, *, when: Callable[[Any], bool] | None = None, keeps_output: bool = False
) -> Callable[[Callable[[fx.GraphModule, Any], int]], GraphPass]:
    """Decorator: `@graph_pass("fuse_bn", when=lambda cfg: cfg.schedule.fuse_bn, keeps_output=True)`."""
    return lambda run: GraphPass(name, run, when, keeps_output)


def run_passes(
    gm: fx.GraphModule, passes: Iterable[GraphPass], ctx: Any = None, check: tuple[Any, ...] | None = None
) -> list[PassReport]:
    """Run `passes` in order on `gm`, in place.

    ctx    is passed to every pass; `ctx.config` decides which passes run.
    check  example arguments of the model. If given, the output is compared before and after every `keeps_output` pass.
    """
    reports: list[PassReport] = []
    output = None  # of the current graph, if known
    if remove_dead_code(gm):
        _finish(gm)
    for step in passes:
        with _naming(step.name):
            if step.when is not None and not step.when(ctx.config):
                reports.append(PassReport(step.name, skipped=True))
                log.debug("pass %s: skipped", step.name)
                continue
            checked = check is not None and step.keeps_output
            if checked and output is None:
                output = _run(gm, check)
            report = _run_pass(gm, step, ctx)
            if report.changes:
                before = output
                output = _run(gm, check) if checked else None
                if checked:
                    _compare(step.name, before, output)
            reports.append(report)
    remove_unused_modules(gm)
    return reports


def _run_pass(gm: fx.GraphModule, step: GraphPass, ctx: Any) -> PassReport:
    start = time.perf_counter()
    changes = step.run(gm, ctx)
    dead = remove_dead_code(gm)
    if changes or dead:
        _finish(gm)
    report = PassReport(step.name, changes, 1000 * (time.perf_counter() - start))
    log.debug("pass %s: %d changes, %.1f ms", report.name, report.changes, report.ms)
    return report


def _finish(gm: fx.GraphModule) -> None:
    try:
        gm.graph.lint()
    except RuntimeError as error:
        raise GraphError(f"the graph is broken: {error}") from error
    gm.recompile()


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Inside, errors name the pass. They keep their type where Python can add notes (3.11)."""
    try:
        yield
    except Exception as error:  # raised again, with the name of the pass
        if hasattr(error, "add_note"):
            error.add_note(f"in graph pass {name!r}")
            raise
        raise GraphError(f"in graph pass {name!r}: {type(error).__name__}: {error}") from error


def _run(gm: fx.GraphModule, args: tuple[Any, ...] | None) -> Any:
    """The float output without a trace: the same random numbers each time, eval mode, copies of the inputs."""
    args = pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, args)
    with evaluating(gm), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return gm(*args or ())


def _compare(name: str, before: Any, after: Any) -> None:
    old, old_tree = pytree.tree_flatten(before)
    new, new_tree = pytree.tree_flatten(after)
    if old_tree == new_tree:
        trouble = ""
    else:
        trouble = f"the structure was {old_tree}, now it is {new_tree}"
    for i, (x, y) in enumerate(zip(old, new)):
        trouble = trouble or _difference(x, y, f"output {i}" if len(old) > 1 else "the output")
    if trouble:
        raise GraphError(
            f"graph pass {name!r} must keep the model's output but changed it: {trouble}\n  fix the pass, or "
            f"declare it with keeps_output=False if it is meant to change the output"
        )


def _difference(x: Any, y: Any, what: str) -> str:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        try:
            torch.testing.assert_close(y, x, rtol=RTOL, atol=ATOL, equal_nan=True)
        except AssertionError as error:
            return f"{what}: {error}"
        return ""
    if isinstance(x, (int, float, str, type(None))) or type(x) is not type(y):
        if x == y and type(x) is type(y):
            return ""
        return f"{what} was {x!r}, now it is {y!r}"
    return ""
