"""Turns pydantic's errors into lines with place, cause and remedy, one line per problem."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from sparsebit.errors import ConfigError, UnknownOptionError

EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "dict": "a mapping",
}
STARTS_WITH_KEY = re.compile(r"[A-Z][A-Z0-9_+]*(\.[A-Z0-9_+]+)*(\[|: )")
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100

CLOSE = 0.65  # of 1: LAYOUT and AUTO are 0.6


def closest(name: str, options: Iterable[str]) -> str | None:
    """The option that `name` may be a typo of."""
    by_lower = {option.lower(): option for option in options}
    close = difflib.get_close_matches(name.lower(), by_lower, 1, CLOSE)
    return by_lower[close[0]] if close else None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """`; did you mean BIT?`, or nothing when no option is close."""
    close = closest(name, options)
    return f"; did you mean {close}?" if close else ""


def unknown_option(name: str, options: Sequence[str]) -> str:
    known = "; there are no options here"
    if options:
        known = f"; options are {', '.join(options)}"
    return f"unknown option{did_you_mean(name, options) or known}"


def show(value: Any) -> str:
    return _short.repr(value)


def refusal(error: ValidationError) -> ConfigError:
    """All problems of one validation in one error; each line starts with the full upper-case key path."""
    lines = []
    kind = ConfigError
    for item in error.errors(include_url=False):
        path = key_path(item["loc"])
        lines += [under(path, text) for text in _describe(item).splitlines()]
        if isinstance(item.get("ctx", {}).get("error"), UnknownOptionError):
            kind = UnknownOptionError
    return kind("\n".join(lines))


def key_path(loc: Sequence[str | int]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part.upper()}"
    return path.lstrip(".")


def under(path: str, text: str) -> str:
    """Put `text` below a key path; a text that starts with a key continues the path."""
    if not path or text.startswith("["):
        return path + text
    if STARTS_WITH_KEY.match(text):
        return f"{path}.{text}"
    return f"{path}: {text}"


def _describe(item: Any) -> str:
    kind = item["type"]
    value = item["input"]
    if kind == "literal_error":
        options = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        return f"{show(value)} is not one of {', '.join(options)}{did_you_mean(str(value), options)}"
    if kind == "value_error":
        return str(item["ctx"]["error"])
    if kind == "missing":
        return "this option has no default and must be given"
    noun = EXPECTED.get(kind.split("_")[0])
    if noun and kind.endswith(("_type", "_from_float", "_parsing")):
        return f"expected {noun}, got {show(value)}"
    return f"{item['msg'].replace('Input should be', 'must be')}, got {show(value)}"
