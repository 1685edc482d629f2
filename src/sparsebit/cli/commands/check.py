"""`sparsebit check`: what would happen to a model, before anything long is started."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sparsebit.cli import options
from sparsebit.cli.app import command
from sparsebit.cli.inputs.inputs import Inputs, example_of
from sparsebit.cli.terminal.output import one_line, show
from sparsebit.cli.terminal.progress import start, status


@command("check", "sparsebit check net.py:build --input-shape 1,3,224,224")
def check(
    model: options.Model,
    weights: options.Weights = None,
    data: options.Data = None,
    input_shape: options.InputShape = None,
    config: options.Config = None,
    preset: options.Preset = None,
    changes: options.Changes = None,
    trace: options.Trace = options.FrontEnd.auto,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="also every op and every layer")] = False,
    json: options.Json = False,
) -> int:
    """Say what traces, quantizes and prunes, what runs in integers, and the memory a calibration needs.

    Exit code 1 if nothing of the model would be quantized.
    """
    start()
    from sparsebit.cli.runs.steps import hint_at_export
    from sparsebit.quantization import QuantModel

    settings = options.quant_config(config, preset, changes)
    net, batches = Inputs(model, weights, data, input_shape, samples=8).load()
    with status("tracing, and running one batch"):
        qmodel = QuantModel(net, settings, example=batches[0], trace=trace.value)
        hint_at_export(qmodel, trace.value)
        report = qmodel.preflight(batches[0])
        pruning = _pruning(net, batches[0])
    ok = bool(report.totals["quantized"])
    if verbose:
        text = f"{_layers(pruning)}\n\n{report}"
    else:
        text = report.short()
    if verbose:
        hint = []
    else:
        hint = ["more         --verbose shows every op and every layer"]
    show(
        {"ok": ok, **report.as_dict(), "pruning": pruning}, "\n".join([text, *_summary(pruning), *hint]), json
    )
    return 0 if ok else 1


def _pruning(net: Any, batch: Any) -> dict[str, Any]:
    """Count the channels of each parameter that can be removed, and collect the reasons for the others."""
    from torch import nn

    from sparsebit.errors import SparsebitError
    from sparsebit.sparse.labels.walk import Walk, walk_of

    if not isinstance(net, nn.Module):
        return {"layers": {}, "fixed": ["an exported program: pruning needs the model's own code"]}
    try:
        walk: Walk = walk_of(net, example_of(net, batch))
    except (SparsebitError, RuntimeError) as error:
        return {"layers": {}, "fixed": [one_line(error)]}
    layers = {}
    for part in walk.slices.values():
        if part.produces and (free := (walk.labels.roots(part.labels) != 0).sum()):
            layers[part.path.removesuffix(".weight")] = {"channels": len(part.labels), "may_go": int(free)}
    return {"layers": layers, "fixed": sorted(set(walk.labels.why_fixed.values()))}


def _layers(pruning: dict[str, Any]) -> str:
    lines = ["channels that can be removed"]
    lines += [f"  {name}: {row['may_go']} of {row['channels']}" for name, row in pruning["layers"].items()]
    return "\n".join([*lines, *(f"  stays: {why}" for why in pruning["fixed"])])


def _summary(pruning: dict[str, Any], most: int = 3) -> list[str]:
    rows = pruning["layers"]
    fixed = pruning["fixed"]
    channels = sum(row["may_go"] for row in rows.values())
    lines = [f"pruning      {channels} channels of {len(rows)} layers can be removed"]
    lines += [f"             stays: {why}" for why in fixed[:most]]
    return lines + (
        [f"             and {len(fixed) - most} other reasons to stay"] if len(fixed) > most else []
    )
