"""The parent's side of the clean process. It is started when it is needed, and again where it has ended meanwhile."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from importlib import resources
from typing import IO, Any

from sparsebit.errors import ExportError

_lock = threading.Lock()
_process: subprocess.Popen[str] | None = None
_errors: IO[bytes] | None = None
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def start() -> None:
    """Begins to import, so that the process is ready when it is asked."""
    with _lock:
        _running()


def ask(question: dict[str, Any]) -> dict[str, Any]:
    """One question, one answer; a process that has ended meanwhile is started again."""
    with _lock:
        for last in (False, True):
            process = _running()
            try:
                answer = _answer(process, question)
            except BrokenPipeError:
                answer = ""
            if answer:
                break
            if last:
                raise ExportError(
                    f"the process that reads the checkpoint ended without an answer: {_last_line()}"
                )
            _stop()
    found: dict[str, Any] = json.loads(answer)
    if not found["clean"]:
        raise ExportError("the process that reads the checkpoint has imported sparsebit; please report it")
    if "broken" in found:
        raise ExportError(f"transformers cannot be imported in a separate process: {found['broken']}")
    return found


def _answer(process: subprocess.Popen[str], question: dict[str, Any]) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()
    return process.stdout.readline()


def _running() -> subprocess.Popen[str]:
    global _process, _errors
    if _process is None or _process.poll() is not None:
        script = resources.files(__package__).joinpath("_worker.py").read_text()
        _errors = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        _process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=_errors,
            text=True,
            env={**os.environ, **OFFLINE},
            cwd=tempfile.gettempdir(),
        )
    return _process


def _stop() -> None:
    global _process
    if _process is not None:
        for pipe in (_process.stdin, _process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # the answer to a question that was given up
                    pipe.close()
        _process.wait()
        _process = None


atexit.register(_stop)


def _last_line() -> str:
    """The last line of its output."""
    if _errors is None:
        return "nothing was printed"
    _errors.seek(0)
    lines = _errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing was printed"
