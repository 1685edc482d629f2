"""A folder with a small model and its data, and the command in this process."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cli_files import fill

from sparsebit.cli import main

# A suite that runs in the background is started with SIGINT ignored, and hands that on to the commands it tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Done:
    """What one command line did."""

    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def sparsebit(capfd) -> Command:
    """The command, run here: `sparsebit("list presets")`, or word by word."""

    def run(*words: object) -> Done:
        words = tuple(shlex.split(str(words[0]))) if len(words) == 1 else words
        capfd.readouterr()
        code = main([str(word) for word in words])
        return Done(code, *capfd.readouterr())

    return run


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return fill(tmp_path)


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """One quantized and one pruned run that tests only read."""
    pytest.importorskip("onnxruntime")
    folder = fill(tmp_path_factory.mktemp("runs"))
    model, data = f"{folder / 'net.py'}:build", str(folder / "x.npy")
    assert main(["quantize", model, "--data", data, "--batch-size", "4", "-o", str(folder / "q")]) == 0
    assert main(["prune", model, "--data", data, "--ratio", "0.5", "-o", str(folder / "p")]) == 0
    return folder
