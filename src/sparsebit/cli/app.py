"""The registry of commands, and the one door where errors become a line and an exit code.

0: done. 1: a check failed. 2: bad input. 70: a defect of Sparsebit. 130: interrupted.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer

import sparsebit
from sparsebit.cli.terminal.output import Interrupted, same, say, show_error, show_json
from sparsebit.errors import SparsebitError
from sparsebit.registry import Registry

EPILOG = "Start with: sparsebit demo   or: sparsebit check net.py:build --input-shape 1,3,224,224"
GROUPS = {  # commands of several words: the help of the first word, and an example
    "config": (
        "Start, check and complete config files.",
        "sparsebit config init --preset w4a8",
    ),
    "llm": (
        "Quantize, measure and try language models.",
        "sparsebit llm quantize models/llama --data text.txt -o runs/w4",
    ),
}


@dataclass(eq=False)
class Command:
    """One command: a function whose arguments are the options, as typer reads them."""

    name: str  # "quantize", or "llm quantize"
    function: Callable[..., Any]
    example: str

    def __post_init__(self) -> None:
        self.__module__ = self.function.__module__  # the registry and `sparsebit list` read these three
        self.__qualname__ = self.function.__qualname__
        self.__doc__ = self.function.__doc__


COMMANDS: Registry[Command] = Registry("command")
Function = TypeVar("Function", bound=Callable[..., Any])


def command(name: str, example: str) -> Callable[[Function], Function]:
    """Register a function as `sparsebit <name>`. Its docstring is the help, with `example` below it."""

    def register(function: Function) -> Function:
        COMMANDS.add([name], Command(name, function, example))
        return function

    return register


def _show_version(wanted: bool) -> None:
    if wanted:
        print(sparsebit.__version__)
        raise typer.Exit


def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which one this is.")
    ] = False,
) -> None:
    """Quantize, prune and ship PyTorch models."""


def commands() -> Registry[Command]:
    """All commands: those of the folder `commands/`, and those that a program registered."""
    COMMANDS.discover("sparsebit.cli.commands")
    return COMMANDS


def build() -> typer.Typer:
    """The command line with every registered command."""
    app = typer.Typer(
        name="sparsebit",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=EPILOG,
    )
    app.callback()(_main)
    groups: dict[str, typer.Typer] = {}
    for found in commands().values():
        group, _, name = found.name.rpartition(" ")
        owner = app
        if group:
            owner = groups.get(group) or _add_group(app, group)
            groups[group] = owner
        owner.command(name, epilog=f"Example: {found.example}")(found.function)
    return app


def _add_group(app: typer.Typer, name: str) -> typer.Typer:
    group = typer.Typer(no_args_is_help=True)
    epilog = None
    text = None
    if name in GROUPS:
        text, example = GROUPS[name]
        epilog = f"Example: {example}"
    app.add_typer(group, name=name, help=text, epilog=epilog)
    return group


def run(argv: Sequence[str] | None) -> int:
    """Parse and run; whatever a user can do wrong is one line, exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    app = build()
    _warn_in_one_line()
    try:
        code = int(app(argv, prog_name="sparsebit", standalone_mode=False) or 0)
        _say_the_last_words()
        return _stopped(argv) if code == 130 else code
    except (SparsebitError, OSError) as error:
        return _fail(_text_of(error), argv)
    except typer.Abort:  # Ctrl-C, in older typers
        return _stopped(argv)
    except Interrupted as error:
        say(f"\n{error}")
        return 130
    except Exception as error:  # the outermost door of the command line: every error becomes one line
        if hasattr(error, "format_message"):  # what the parser refuses; older typers have click's own classes
            if not str(error.format_message()).strip():  # no arguments at all: the help was shown
                return 0
            return _fail(f"{error.format_message()} (see: sparsebit {_command(argv)}--help)", argv)
        traceback.print_exc()
        show_error("this is a defect of Sparsebit: please report it with the lines above")
        return 70


def _stopped(argv: list[str]) -> int:
    say(f"\ninterrupted; files are written whole or not at all. Start again with:\n  {same(argv)}")
    return 130


def _fail(text: str, argv: list[str]) -> int:
    show_error(text)
    if "--json" in argv:
        show_json({"ok": False, "error": text})
    return 2


def _text_of(error: BaseException) -> str:
    if isinstance(error, OSError) and not isinstance(error, SparsebitError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{error}{notes}"


def _command(argv: list[str]) -> str:
    if argv and not argv[0].startswith("-"):
        return f"{argv[0]} "
    return ""


class _ToStderr(logging.Handler):
    """Writes to the current stderr: a status line puts another stream there.

    A record with `at_end` is about the result: it is printed below the result, in red on terminals.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at_end: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "at_end", False):
            self.at_end.append(self.format(record))
        else:
            print(self.format(record), file=sys.stderr)


def _say_the_last_words() -> None:
    sys.stdout.flush()
    for handler in logging.getLogger("sparsebit").handlers:
        for line in handler.at_end if isinstance(handler, _ToStderr) else ():
            say(f"\x1b[1;31m{line}\x1b[0m" if sys.stderr.isatty() else line)


def _warn_in_one_line() -> None:
    """Warnings of the library on stderr; those of torch and its exporter only in the log of a run."""
    log = logging.getLogger("sparsebit")
    handler = next((handler for handler in log.handlers if isinstance(handler, _ToStderr)), _ToStderr())
    handler.at_end.clear()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    if handler not in log.handlers:
        log.addHandler(handler)
    logging.captureWarnings(True)
    others = logging.getLogger("py.warnings")
    others.addHandler(logging.NullHandler())
    others.propagate = False
