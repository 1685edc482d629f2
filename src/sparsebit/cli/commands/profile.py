"""`sparsebit profile`: which layers of a quantized run cost accuracy."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsebit.cli import options
from sparsebit.cli.app import command
from sparsebit.cli.terminal.output import InputError, show
from sparsebit.cli.terminal.progress import start


@command("profile", "sparsebit profile runs/w8a8")
def profile(
    run: options.Run,
    batches: Annotated[int, typer.Option(min=1, help="batches of the run's data to measure on")] = 1,
    json: options.Json = False,
) -> None:
    """Measure the error of every layer, and the override that would fix it; kept in the run as profile.json."""
    from sparsebit.cli.runs import steps
    from sparsebit.cli.runs.run import Run

    opened = Run.open(run)
    if opened.command != "quantize":
        raise InputError(f"{run}: is a run of {opened.command}; only quantized models have errors per layer")
    start()
    qmodel, found, _ = steps.finished(opened)
    result = qmodel.profile(found[:batches])
    opened.write("profile.json", result.as_dict())
    steps.refresh_report(run)
    show(result.as_dict(), str(result), json)
