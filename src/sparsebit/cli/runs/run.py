"""Run: a folder with run.json, which holds the settings and the finished steps, and with a log."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sparsebit
from sparsebit.cli.inputs.inputs import Inputs
from sparsebit.cli.terminal.output import InputError, Interrupted, plain, same
from sparsebit.errors import SparsebitError
from sparsebit.utils.files import write_whole

ABOUT = "run.json"
LOG = "log.txt"
log = logging.getLogger("sparsebit")


class Run:
    def __init__(self, folder: Path, about: dict[str, Any]):
        self.folder = folder
        self.about = about

    @classmethod
    def open(cls, folder: Path) -> Run:
        """A run of before."""
        try:
            about = json.loads((folder / ABOUT).read_text("utf-8"))
            Inputs(**about["inputs"]), about["command"], about["settings"], about["steps"]
        except FileNotFoundError:
            what = "no such folder"
            if folder.is_dir():
                what = "is not a folder of a run: it has no run.json"
            raise InputError(f"{folder}: {what}") from None
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{folder / ABOUT}: is broken, or was written by another version") from None
        return cls(folder, about)

    @property
    def command(self) -> str:
        return str(self.about["command"])

    @property
    def inputs(self) -> Inputs:
        return Inputs(**self.about["inputs"])

    # -- steps ---------------------------------------------------------------------------------------
    def done(self, step: str) -> bool:
        return step in self.about["steps"]

    def finish(self, step: str, seconds: float = 0.0, **facts: Any) -> None:
        self.about["steps"][step] = {"seconds": round(seconds, 2), **plain(facts)}
        self.save()

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """A step that counts only when it is complete; run.json keeps the entries of the mapping."""
        start = time.perf_counter()
        facts = dict[str, Any]()
        log.info("step %s", name)
        yield facts
        self.finish(name, time.perf_counter() - start, **facts)

    def write(self, name: str, value: Any, indent: int | None = 1) -> None:
        """A JSON file of the run, whole or not at all."""
        write_whole(self.folder / name, (json.dumps(plain(value), indent=indent) + "\n").encode())

    def save(self) -> None:
        self.write(ABOUT, self.about)


@contextmanager
def running(
    folder: Path, command: str, inputs: Inputs, settings: Mapping[str, Any], resume: bool
) -> Iterator[Run]:
    """The folder of a new run, or of a run that is resumed.

    After an error in the first step it is removed. After Ctrl-C it stays, and the message explains how to resume.
    """
    asked = {"command": command, "inputs": inputs.absolute(), "settings": plain(settings)}
    fresh = check_output(folder, asked, resume)
    made = [p for p in (folder, *folder.absolute().parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if fresh:
        run = Run(folder, {"sparsebit": sparsebit.__version__, **asked, "steps": {}})
    else:
        run = Run.open(folder)
    try:
        with _logged(folder / LOG):
            run.save()
            yield run
    except KeyboardInterrupt:
        done = ", ".join(run.about["steps"]) or "nothing yet"
        raise Interrupted(f"interrupted; finished: {done}. Resume with:\n  {again()}") from None
    except (SparsebitError, OSError):
        if fresh and not run.about["steps"]:
            for path in made[-1:] or list(folder.iterdir()):  # an empty folder that was there stays
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def check_output(folder: Path, asked: Mapping[str, Any], resume: bool) -> bool:
    """Is this a new folder? One that is taken is refused, before any work."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output {folder}: is a file; name a folder")
    if not folder.exists() or not any(folder.iterdir()):
        place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        if not place.is_dir() or not os.access(place, os.W_OK):
            what = "is a file"
            if place.is_dir():
                what = "cannot be written to"
            raise InputError(f"--output {folder}: {place} {what}; name another folder")
        return True
    if not (folder / ABOUT).is_file():
        raise InputError(f"--output {folder}: is not empty; name a new folder")
    if not resume:
        raise InputError(
            f"--output {folder}: holds a run already; name a new folder, or resume it with --resume"
        )
    about = Run.open(folder).about
    for key, value in asked.items():
        was = about[key]
        if was != value:
            both = {**was, **value} if isinstance(value, dict) else {}
            names = [k for k in both if was.get(k) != value.get(k)] or [key]
            raise InputError(
                f"--resume: {folder} was started with another {names[0]}; repeat the same command, or name a new "
                f"--output"
            )
    return False


def again() -> str:
    """The command line that resumes a run."""
    return f"{same([w for w in sys.argv[1:] if w != '--resume'])} --resume"


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    loggers = (log, logging.getLogger("py.warnings"))
    level = log.level
    log.setLevel(logging.INFO)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    except Exception:  # logged and raised again
        log.info("stopped by an error", exc_info=True)
        raise
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        log.setLevel(level)
        handler.close()
