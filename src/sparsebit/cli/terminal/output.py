"""What commands print: text on stdout for people, JSON for programs, errors as one line on stderr."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparsebit.errors import SparsebitError


class InputError(SparsebitError, ValueError):
    """Something that was named on the command line cannot be used; the message starts with its name."""


class Interrupted(Exception):
    """Ctrl-C in a run that can be resumed; the message explains how."""


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """The message of a foreign exception, on one line."""
    if isinstance(error, str):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    return f"{text[: limit - 3]}..."


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """`; did you mean BIT?`, or nothing; loads the configs only when something is wrong."""
    from sparsebit.config import did_you_mean as hint

    return hint(name, options)


def show_error(text: str) -> None:
    """One line per problem; indented lines (`  fix: ...`) belong to the one before."""
    for line in re.sub(r"\n\s+", "; ", text.strip()).splitlines():
        print(f"error: {line}", file=sys.stderr)


def say(text: str) -> None:
    """A remark for the person at the keyboard; never in the way of --json."""
    print(text, file=sys.stderr)


def same(argv: Sequence[str]) -> str:
    """A command line, to be copied."""
    return f"sparsebit {shlex.join(argv)}"


def plain(value: Any) -> Any:
    """Ready for JSON, which has no infinity: it is written as text."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return str(value)


def show_json(value: Any) -> None:
    print(json.dumps(plain(value), indent=1))


def show(value: Mapping[str, Any], text: str, as_json: bool) -> None:
    """The result of a command: `value` as JSON, or `text`."""
    if as_json:
        show_json(value)
    else:
        print(text)


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, no_wrap=i == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
