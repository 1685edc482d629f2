"""`sparsebit list`: what is registered, with its first line of help and its options."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any

import typer

from sparsebit.cli import options
from sparsebit.cli.app import app
from sparsebit.cli.terminal.output import show_json, show_table
from sparsebit.cli.terminal.progress import start


class Kind(str, Enum):
    observers = "observers"
    quantizers = "quantizers"
    sparsers = "sparsers"
    ops = "ops"
    backends = "backends"
    presets = "presets"


@app.command("list", epilog="Example: sparsebit list observers")
def list_command(
    kind: Annotated[Kind, typer.Argument(help="what to list", show_default=False)],
    json: options.Json = False,
) -> None:
    """List observers, quantizers, sparsers, ops, backends or presets, with their options."""
    if kind is not Kind.presets:
        start()
    rows = KINDS[kind]()
    if json:
        show_json(rows)
        return
    cells = [[row["name"], row["help"], "\n".join(row.get("options", []))] for row in rows]
    header = ["name", "what it is", "options"]
    if not any(row[2] for row in cells):
        header, cells = header[:2], [row[:2] for row in cells]
    show_table(f"{len(rows)} {kind.value}", header, cells)


def _plugins(registry: Mapping[Any, Any]) -> list[dict[str, Any]]:
    return [
        {"name": str(name), "help": first_line(cls), "options": _options(cls)}
        for name, cls in sorted(registry.items())
    ]


def first_line(cls: Any) -> str:
    """Of the class's own docstring, or of its file's."""
    text = vars(cls).get("__doc__") or sys.modules[cls.__module__].__doc__ or ""
    return inspect.cleandoc(text).partition("\n")[0]


def _options(cls: Any) -> list[str]:
    """`ALPHA = 0.001  what it means`."""
    fields = getattr(getattr(cls, "Params", None), "model_fields", {})
    return [
        f"{name.upper()} = {field.get_default(call_default_factory=True)}"
        + (f"  {field.description}" if field.description else "")
        for name, field in fields.items()
    ]


def _observers() -> list[dict[str, Any]]:
    from sparsebit.quantization.observers import OBSERVERS_MAP

    return _plugins(OBSERVERS_MAP)


def _quantizers() -> list[dict[str, Any]]:
    from sparsebit.quantization.quantizers import QUANTIZERS_MAP

    return _plugins(QUANTIZERS_MAP)


def _sparsers() -> list[dict[str, Any]]:
    from sparsebit.sparse.sparsers import SPARSERS_MAP

    return [
        row | {"prunes": list(SPARSERS_MAP[row["name"]].KINDS), "needs": SPARSERS_MAP[row["name"]].NEEDS}
        for row in _plugins(SPARSERS_MAP)
    ]


def _backends() -> list[dict[str, Any]]:
    from sparsebit.export.backends import BACKENDS

    return [{"name": str(name), "help": first_line_of_file(cls)} for name, cls in sorted(BACKENDS.items())]


def first_line_of_file(cls: Any) -> str:
    return inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "").partition("\n")[0]


def _presets() -> list[dict[str, Any]]:
    from sparsebit.quantization.presets import presets

    return [{"name": name, "help": text} for name, text in presets().items()]


def _ops() -> list[dict[str, Any]]:
    """One row per QModule, with all spellings that it replaces."""
    from sparsebit.quantization.modules import QMODULE_MAP

    spellings: dict[Any, set[str]] = {}
    for op, cls in QMODULE_MAP.items():
        spellings.setdefault(cls, set()).add(_spelling(op))
    rows = [{"name": cls.__name__, "help": ", ".join(sorted(ops))} for cls, ops in spellings.items()]
    return sorted(rows, key=lambda row: row["name"])


def _spelling(op: Any) -> str:
    if isinstance(op, str):
        return op
    module, name = getattr(op, "__module__", None) or "", getattr(op, "__qualname__", None)
    home = module.replace("torch.nn.modules", "nn").split(".")[0] if module else ""
    return f"{home}.{name}".strip(".") if name else str(op)


KINDS: dict[Kind, Callable[[], list[dict[str, Any]]]] = {
    Kind.observers: _observers,
    Kind.quantizers: _quantizers,
    Kind.sparsers: _sparsers,
    Kind.ops: _ops,
    Kind.backends: _backends,
    Kind.presets: _presets,
}
