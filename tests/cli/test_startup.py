"""The command as users start it: a process of its own. Help is quick, and Ctrl-C leaves a run that goes on."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

COMMANDS = ["demo", "check", "quantize", "prune", "export", "verify", "profile", "report", "list", "config"]
COMMANDS += ["llm"]
PARTS = ["config init", "config check", "config schema", "llm quantize", "llm eval", "llm chat", "llm export"]
SRC = Path(__file__).parents[2] / "src"


def start(*words: str, env: dict[str, str] | None = None, cwd: Path | None = None):
    paths = os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "100", **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", "sparsebit", *words], capture_output=True, text=True, env=environment, cwd=cwd
    )


def test_help_names_every_command():
    done = start("--help")
    assert done.returncode == 0 and not done.stderr
    assert not [name for name in COMMANDS if not re.search(rf"^\W*{name} ", done.stdout, re.MULTILINE)]
    assert start().returncode in (0, 2)  # no command: the help


@pytest.mark.parametrize("command", [*COMMANDS, *PARTS])
def test_help_has_an_example(sparsebit, command):
    done = sparsebit(f"{command} --help")
    assert done.code == 0
    example = f"Example: sparsebit {command}"
    assert example in " ".join(done.out.split()), done.out


def test_version(sparsebit):
    import sparsebit as library

    assert sparsebit("--version").out.strip() == library.__version__


def test_help_is_quick(tmp_path):
    """At most 0.5 s on top of Python's own start, in CPU time and the best of five; with compiled files."""
    env = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    best = 9.0
    for _ in range(5):
        best = min(best, _cpu(["-m", "sparsebit", "--help"], env) - _cpu(["-c", "pass"], env))
        if best < 0.5:
            break
    assert best < 0.5, f"sparsebit --help takes {best:.2f} s"


def _cpu(words: list[str], env: dict[str, str]) -> float:
    before = os.times()
    paths = {"PYTHONPATH": str(SRC)}
    subprocess.run(
        [sys.executable, *words], capture_output=True, env={**os.environ, **paths, **env}, check=True
    )
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "quantize --help",
        "llm --help",
        "llm quantize nowhere -o out",
        "report nowhere",
        "list presets",
    ],
)
def test_light_commands_load_nothing_heavy(words):
    code = (
        "import sys\nfrom sparsebit.cli import main\n"
        f"main({words.split()!r})\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'transformers', 'sklearn', 'numpy', 'PIL'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert done.stdout.splitlines()[-1] == "LOADED []"


INTERRUPTED = """

def build_and_interrupt():
    \"\"\"Ctrl-C comes when the export starts.\"\"\"
    import os, signal, time
    import sparsebit

    def export_onnx(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    if os.environ.get("INTERRUPT"):
        sparsebit.QuantModel.export_onnx = export_onnx
    return build()
"""


@pytest.mark.slow
def test_ctrl_c_leaves_a_run_that_goes_on(work):
    pytest.importorskip("onnxruntime")
    with (work / "net.py").open("a") as file:
        file.write(INTERRUPTED)
    words = ["quantize", "net.py:build_and_interrupt", "--data", "x.npy", "-o", "a run"]
    done = start(*words, env={"INTERRUPT": "1"}, cwd=work)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert "finished: quantize" in done.stderr and "--resume" in done.stderr
    assert not (work / "a run/model.onnx").exists()
    weights = (work / "a run/model.safetensors").read_bytes()
    again = done.stderr.strip().splitlines()[-1].strip()
    assert again == "sparsebit quantize net.py:build_and_interrupt --data x.npy -o 'a run' --resume"
    resumed = start(*shlex.split(again)[1:], "--json", cwd=work)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["export"]["ok"] is True
    assert (work / "a run/model.safetensors").read_bytes() == weights


def test_json_is_alone_on_stdout_in_a_terminal(work):
    """In a pseudo-terminal, progress bars are shown, from the start; they must not reach stdout."""
    words = ["quantize", "net.py:build", "--data", "x.npy", "--no-export", "-o", "run", "--json"]
    code, out, shown = in_a_terminal(words, work)
    assert code == 0 and json.loads(out)["ok"] is True
    assert shown.index("starting") < shown.index("loading the model") < shown.index("calibrating")


def test_interrupted_before_anything_is_written(work):
    """Ctrl-C while the data loads: nothing is left."""
    (work / "slow.py").write_text(
        "import pathlib, time\n\ndef batches():\n"
        "    pathlib.Path('loading').touch()\n    time.sleep(60)\n    yield None\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "sparsebit", "quantize", "net.py:build", "--data", "slow.py:batches", "-o", "run"],
        stderr=subprocess.PIPE, cwd=work, text=True, env={**os.environ, "PYTHONPATH": str(SRC)},
    )  # fmt: skip
    for _ in range(600):
        if (work / "loading").exists():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert not (work / "run").exists()


def in_a_terminal(words: list[str], cwd: Path) -> tuple[int, str, str]:
    """Exit code, stdout, and what a terminal at stderr got."""
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "sparsebit", *words], stdout=subprocess.PIPE, stderr=slave, cwd=cwd, text=True,
        env={**os.environ, "PYTHONPATH": str(SRC), "TERM": "xterm", "COLUMNS": "120"},
    )  # fmt: skip
    os.close(slave)
    shown = bytearray()

    def collect() -> None:
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:  # the other end is closed
                return
            if not part:
                return
            shown.extend(part)

    reader = threading.Thread(target=collect)
    reader.start()
    out, _ = process.communicate(timeout=120)
    reader.join(10)
    os.close(master)
    return process.returncode, out, shown.decode(errors="replace")


@pytest.mark.slow
def test_bars_on_terminals_and_nowhere_else(work):
    words = [
        "prune",
        "net.py:build",
        "--data",
        "x.npy",
        "--macs",
        "0.5",
        "--no-export",
        "--json",
        "-o",
        "run",
    ]
    code, out, shown = in_a_terminal(words, work)
    assert code == 0 and json.loads(out)["ok"] is True, shown
    assert "choosing and removing channels" in shown and "0/2" in shown and "loading the model" in shown
    done = start(*words[:-1], "other", cwd=work)
    assert done.returncode == 0 and json.loads(done.stdout)["ok"] is True
    assert re.fullmatch("warning: batches: .* 12 samples, .*\n", done.stderr)  # and no bar


@pytest.mark.slow
def test_calibration_counts_batches(work):
    words = ["quantize", "net.py:build", "--data", "x.npy", "--batch-size", "4", "--no-export", "-o", "run"]
    code, _, shown = in_a_terminal(words, work)
    assert code == 0 and "calibrating" in shown and re.search(r"[0-3]/3", shown), shown


def test_warnings_stay_whole_beside_a_bar(monkeypatch):
    """A line of the library, said while a bar is shown, is a line of its own."""
    import io

    from sparsebit.cli.terminal.progress import status
    from sparsebit.utils.progress import wants_bar

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with status("working", [1, 2]) as batches:
        assert not wants_bar(None) and list(batches) == [1, 2] and len(batches) == 2
        print("warning: [red] is no colour here", file=sys.stderr)
    assert sys.stderr is terminal
    assert "warning: [red] is no colour here\n" in terminal.getvalue()


@pytest.mark.slow
def test_ctrl_c_in_a_prune(work):
    """SIGINT from outside while channels are chosen: the run stays, and the printed command ends it."""
    with (work / "net.py").open("a") as file:
        file.write(PAUSED)
    words = [
        "prune",
        "net.py:build_and_pause",
        "--data",
        "x.npy",
        "--ratio",
        "0.5",
        "--no-export",
        "-o",
        "run",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "sparsebit", *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        cwd=work, text=True, env={**os.environ, "PYTHONPATH": str(SRC), "PAUSE": "1"},
    )  # fmt: skip
    for _ in range(600):
        if (work / "paused").exists():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    again = err.strip().splitlines()[-1].strip()
    assert again == f"sparsebit {shlex.join(words)} --resume" and (work / "run/run.json").exists()
    resumed = start(*shlex.split(again)[1:], "--json", cwd=work)
    assert resumed.returncode == 0 and json.loads(resumed.stdout)["prune"]["params"], resumed.stderr


PAUSED = """

def build_and_pause():
    import os, pathlib, time
    import sparsebit.sparse.sparse_model as library

    def calc_params(*args, **kwargs):
        pathlib.Path("paused").touch()
        time.sleep(60)

    if os.environ.get("PAUSE"):
        library.SparseModel.calc_params = calc_params
    return build()
"""
