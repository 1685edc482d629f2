"""Command lines of README and docs do what they say, as far as seconds allow.

Scripts read their options and stop there (benchmarks take minutes; examples run in test_examples.py), make shows its
recipe, pip installs nothing. Python blocks are run by test_docs_code.py, console blocks by cli/test_command_page.py.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs_pages import ALL_MARKDOWN, ROOT, blocks_of, name_of

SCRIPT = re.compile(r"(benchmarks|examples|tests)/[\w/.-]+\.py")
INLINE = re.compile(
    rf"`((?:PYTHONPATH=src )?(?:python3?|pip|make|sparsebit|torchrun|{SCRIPT.pattern})(?: [^`]*)?)`"
)


def lines_of(page: Path) -> list[str]:
    """The lines of bash blocks and the commands inside sentences, without comments."""
    text = page.read_text(encoding="utf-8")
    shown = [line for block in blocks_of(page, "bash") for line in block.code.splitlines()]
    inline = [found[1] for found in INLINE.finditer(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))]
    return [
        line.partition(" #")[0].strip() for line in [*shown, *inline] if " " in line or SCRIPT.match(line)
    ]


LINES = {line: name_of(page) for page in reversed(ALL_MARKDOWN) for line in lines_of(page)}


class Parsed(Exception):
    """A script has understood its options."""


def run_script(script: str, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    source = (ROOT / script).read_text(encoding="utf-8")
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, args=None, namespace=None) -> None:
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [script, *given])
    monkeypatch.setattr(sys, "path", [str((ROOT / script).parent), *sys.path])
    known = set(sys.modules)
    try:
        if any(name in source for name in ("ArgumentParser", "inputs.Parser", "add_options", "helpers")):
            with pytest.raises((Parsed, SystemExit)) as ended:
                runpy.run_path(str(ROOT / script), run_name="__main__")
            assert ended.type is Parsed or (ended.value.code in (0, None) and "--help" in given)
        else:  # takes none, and would work for minutes
            assert not given
            runpy.run_path(str(ROOT / script), run_name="imported")
    finally:  # `model` and `helpers` mean something else in the next folder
        for name in set(sys.modules) - known:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith((f"{ROOT}/b", f"{ROOT}/e")):
                del sys.modules[name]


def install(words: list[str]) -> None:
    """pip, with the project where the page names the package, and without dependencies."""
    installed = {d.name for d in importlib.metadata.distributions()}
    for package in {
        "hatchling",
        "editables",
        "pip",
    } - installed:  # not find_spec: looking for pip disables distutils
        pytest.skip(f"needs {package}")
    assert words[0] == "install"
    here = [re.sub(r"^(sparsebit|\.)(?=\[|$)", str(ROOT), word) for word in words[1:]]
    offline = ["--dry-run", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *offline, *here]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Would install sparsebit" in done.stdout and "does not provide the extra" not in done.stderr


def ask_sparsebit(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """The command is there, and its help names the options."""
    from sparsebit.cli import main

    command = words[: 0 if words[0].startswith("-") else 2 if words[0] in ("llm", "config") else 1]
    assert main([*command, "--help"]) == 0
    shown = capfd.readouterr().out
    assert not [word for word in words if word.startswith("--") and word not in shown]


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{LINES[line]}: {line}")
def test_command(line, monkeypatch, capfd, tmp_path):
    words = shlex.split(line)
    monkeypatch.chdir(tmp_path)
    for name in {"alpaca_data.json", *(word for word in words if word.endswith((".txt", ".json")))}:
        if "/" not in name:
            Path(name).write_text("a text that the page calls so")
    words = words[1:] if words[0] == "PYTHONPATH=src" else words
    script = next((i for i, word in enumerate(words) if SCRIPT.fullmatch(word)), None)
    if script is not None and re.fullmatch(
        r"(python3? |torchrun --nproc-per-node \d+ )?", " ".join([*words[:script], ""])
    ):
        if len(words) > 1:  # else it is only the name of a file
            run_script(words[script], words[script + 1 :], monkeypatch)
        assert (ROOT / words[script]).is_file(), f"{words[script]} does not exist"
    elif words[0] == "make":
        if shutil.which("make") is None:
            pytest.skip("make is not installed")
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, done.stderr
    elif words[0] == "pip":
        install(words[1:])
    elif words[0] == "sparsebit" or words[:3] == ["python", "-m", "sparsebit"]:
        ask_sparsebit(words[1:] if words[0] == "sparsebit" else [*words[3:], "--help"], capfd)
    elif words[:2] == ["python", "-c"]:
        exec(words[2], {})
    else:
        pytest.fail(f"{LINES[line]}: no test runs `{line}`")


def test_the_patterns_find_something(tmp_path):
    (tmp_path / "page.md").write_text(
        "Say `make demo`, not `make`.\n```bash\npip install .  # here\n```\n"
        "```text\n`make x`\n```\n`benchmarks/a.py --b`, which is `benchmarks/a.py`"
    )
    assert lines_of(tmp_path / "page.md") == [
        "pip install .",
        "make demo",
        "benchmarks/a.py --b",
        "benchmarks/a.py",
    ]
    assert len(LINES) > 30 and {"make demo", "make test", "make bench", "pip install -e ."} <= set(LINES)


@pytest.mark.parametrize(
    "line", ["benchmarks/pruning.py --deepness 3", "benchmarks/pruning.py --depths many"]
)
def test_a_wrong_option_is_noticed(line, monkeypatch):
    words = line.split()
    with pytest.raises(AssertionError):
        run_script(words[0], words[1:], monkeypatch)
