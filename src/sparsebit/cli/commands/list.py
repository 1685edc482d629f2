"""`sparsebit list`: the registered plug-ins, each with its first line of help and its options."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from sparsebit.cli import options
from sparsebit.cli.app import command
from sparsebit.cli.terminal.output import InputError, did_you_mean, show_json, show_table
from sparsebit.cli.terminal.progress import start
from sparsebit.registries import REGISTRIES, registry

LIGHT = ("presets", "commands", "report-formats")  # listed without torch


@command("list", "sparsebit list observers")
def list_command(
    kind: Annotated[str, typer.Argument(help=f"one of: {', '.join(REGISTRIES)}", show_default=False)],
    json: options.Json = False,
) -> None:
    """List the plug-ins of one kind with their options: observers, sparsers, presets, llm-methods and others."""
    if kind not in REGISTRIES:
        hint = did_you_mean(kind, REGISTRIES)
        raise InputError(f"{kind}: there is no such kind{hint} ({', '.join(REGISTRIES)})")
    if kind not in LIGHT:
        start()
    rows = rows_of(registry(kind))
    if json:
        show_json(rows)
        return
    header = ["name", "what it is", "options"]
    cells = []
    for row in rows:
        cells.append([row["name"], row["help"], "\n".join(row.get("options", []))])
    if not any(row[2] for row in cells):
        header = header[:2]
        cells = [row[:2] for row in cells]
    show_table(f"{len(rows)} {kind}", header, cells)


def rows_of(plugins: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """One row per plug-in: its name, its description, and its options, sorted by name.

    Plug-ins for ops have objects as keys; their row has the name of the class, and all ops that it is for.
    """
    if all(isinstance(key, str) for key in plugins):
        rows = [_row(str(name), plugin) for name, plugin in plugins.items()]
    else:
        rows = list(_rows_by_op(plugins))
    return sorted(rows, key=lambda row: str(row["name"]))


def _row(name: str, plugin: Any) -> dict[str, Any]:
    if isinstance(plugin, str):  # a preset
        return {"name": name, "help": plugin}
    row: dict[str, Any] = {"name": name, "help": first_line(plugin)}
    found = list(_options(plugin))
    if found or hasattr(plugin, "Params"):
        row["options"] = found
    if hasattr(plugin, "KINDS"):  # of a sparser
        row["prunes"] = list(plugin.KINDS)
        row["needs"] = plugin.NEEDS
    return row


def _rows_by_op(plugins: Mapping[Any, Any]) -> Iterator[dict[str, Any]]:
    spellings: dict[Any, set[str]] = {}
    for op, plugin in plugins.items():
        spellings.setdefault(plugin, set()).add(_spelling(op))
    for plugin, ops in spellings.items():
        yield {"name": plugin.__name__, "help": ", ".join(sorted(ops))}


def first_line(plugin: Any) -> str:
    """The first line of the plug-in's docstring, or of the docstring of its file."""
    text = vars(plugin).get("__doc__") or sys.modules[plugin.__module__].__doc__ or ""
    return inspect.cleandoc(text).partition("\n")[0]


def _options(plugin: Any) -> Iterator[str]:
    """`ALPHA = 0.001 the meaning` of a class with Params; `alpha = 0.5` of an LLM method."""
    fields = getattr(getattr(plugin, "Params", None), "model_fields", {})
    for name, field in fields.items():
        text = f"{name.upper()} = {field.get_default(call_default_factory=True)}"
        if field.description:
            text += f"  {field.description}"
        yield text
    defaults = getattr(plugin, "options", None)
    if callable(defaults):
        for name, value in defaults().items():
            yield f"{name} = {value}"


def _spelling(op: Any) -> str:
    if isinstance(op, str):
        return op
    name = getattr(op, "__qualname__", None)
    if not name:
        return str(op)
    module = getattr(op, "__module__", None) or ""
    package = module.replace("torch.nn.modules", "nn").split(".")[0]
    return f"{package}.{name}".strip(".")
