"""`sparsebit demo`."""

from __future__ import annotations

from sparsebit.cli import options
from sparsebit.cli.app import command
from sparsebit.cli.terminal.output import show_json
from sparsebit.cli.terminal.progress import start


@command("demo", "sparsebit demo")
def demo(json: options.Json = False) -> None:
    """Train, quantize and prune a small CNN on real handwritten digits, and show a table."""
    start()
    from sparsebit.cli import demo as digits

    result = digits.run(quiet=json)
    if json:
        show_json(result)
