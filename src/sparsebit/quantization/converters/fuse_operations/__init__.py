"""Passes over QModules, after the quantizers are attached."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import fx

from sparsebit.graph.passes import GraphPass, graph_pass, run_passes
from sparsebit.quantization.converters.fuse_operations.order import FUSE_PASSES

# another name here: `fuse_operations.reuse_memory` is the file
from sparsebit.quantization.converters.fuse_operations.reuse_memory import reuse_memory as _reuse_memory
from sparsebit.quantization.converters.tasks import passes_named
from sparsebit.quantization.quant_config import ScheduleConfig

__all__ = ["FINAL_PASSES", "FUSE_PASSES", "fuse_operations", "own_tasks"]


@graph_pass("own_tasks")
def own_tasks(gm: fx.GraphModule, ctx: Any) -> int:
    """Legacy: the tasks that users appended to `lists`; a pass, so that QuantModel runs them too."""
    steps = _listed(own_only=True)
    if steps:
        return sum(report.changes for report in run_passes(gm, steps, ctx))
    return 0


# after the passes that users hand to QuantModel; reuse_memory looks at the readers of values, so it is the last
FINAL_PASSES = [own_tasks, _reuse_memory]


def fuse_operations(
    model: fx.GraphModule, config: Any, custom_lists: list[str] | None = None
) -> fx.GraphModule:
    """Run the tasks of `lists` that `config` (the SCHEDULE section) switches on, or all those of `custom_lists`."""
    if custom_lists is None:
        passes = _listed()
    else:
        passes = [replace(step, when=None) for step in passes_named(custom_lists, FUSE_PASSES, __name__)]
    run_passes(model, passes, SimpleNamespace(config=SimpleNamespace(schedule=ScheduleConfig.load(config))))
    return model


def _listed(own_only: bool = False) -> list[GraphPass]:
    """The passes of `lists`; SCHEDULE.<TASK> switches the tasks of users as it switches ours."""
    from sparsebit.quantization.converters.fuse_operations.lists import lists

    built_in = {step.name for step in FUSE_PASSES}
    names = [name for name in lists if not own_only or name not in built_in]
    passes = passes_named(names, FUSE_PASSES, __name__)
    found: list[GraphPass] = []
    for step in passes:
        found.append(step if step.name in built_in else _switched(step))
    return found


def _switched(step: GraphPass) -> GraphPass:
    return replace(step, when=lambda config: config.schedule.enabled(step.name))
