"""The `sparsebit` command: a thin layer over the library. One file of `commands/` is one command."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. Nothing heavy is imported before a command needs it."""
    from sparsebit.cli.app import run

    return run(argv)
