"""`file.py:name` and `package.module:name`: objects of the user's own code."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from sparsebit.cli.terminal.output import InputError, did_you_mean, one_line


def find_object(spec: str) -> Any:
    """The object that `spec` names. The folder of the file, or the current one, is on the path as for a script."""
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise InputError(f"{spec}: which function of it? write {spec.strip(':')}:name")
    if where.endswith(".py"):
        module = _of_file(spec, Path(where))
    else:
        module = _of_package(spec, where)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            hint = did_you_mean(name, public) or f"; it has {', '.join(public[:8]) or 'no functions'}"
            raise InputError(f"{spec}: {where} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


def call(spec: str, function: Any) -> Any:
    """Call the user's function. Its exception becomes one line, with the line of the file."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise InputError(f"{spec}: failed{_place(error)}: {one_line(error)}") from error


def _of_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    path = path.resolve()
    content = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{content}"
    if name in sys.modules:  # the model and the data of one file share its classes
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    run = found.loader.exec_module
    try:
        call(spec, lambda: run(module))
    except InputError:
        del sys.modules[name]
        raise
    return module


def _of_package(spec: str, name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
    except (ModuleNotFoundError, ValueError) as error:
        hint = ""
        if Path(f"{name}.py").exists():
            hint = "; a file is named with its ending, as net.py:build"
        raise InputError(f"{spec}: {one_line(error)}{hint}") from None
    module: ModuleType = call(spec, lambda: importlib.import_module(name))
    return module


def _place(error: BaseException) -> str:
    """The file and line of the user's code that raised the error, or ""."""
    if isinstance(error, SyntaxError):
        return f" at line {error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    own = [f for f in frames if not f.filename.startswith("<") and "/sparsebit/cli/" not in f.filename]
    if own:
        return f" at {Path(own[-1].filename).name} line {own[-1].lineno}"
    return ""
