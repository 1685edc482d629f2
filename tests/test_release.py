"""What would be published: the versions we claim, wheel and sdist, the files beside them, and how files are read."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import sparsebit

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "sparsebit"


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def claimed() -> dict[str, Version]:
    """The lower bound of every package that pyproject.toml names."""
    lines = re.findall(r'"([\w.-]+)>=([\d.]+)[^"]*"', text("pyproject.toml"))
    return {name.lower(): Version(version) for name, version in lines}


# -- versions ------------------------------------------------------------------------------------------------
def with_torch(version: str, folder: Path, run: Sequence[str] = ("-c", "import sparsebit")) -> Any:
    """Python where torch has this version, and cannot do anything else."""
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text("raise RuntimeError('sparsebit must not import torch')")
    (folder / "torch/version.py").write_text(f"__all__ = ['__version__']\n__version__ = '{version}'\n")
    paths = os.pathsep.join([str(folder), str(SOURCE.parent)])
    command = [sys.executable, *run]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})


@pytest.mark.parametrize("version", ["2.6.0+cu124", "2.8.0", "1.13.0a0+git1"])
def test_an_old_torch_is_refused_in_one_line(version, tmp_path):
    done = with_torch(version, tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last == (
        f"ImportError: sparsebit {sparsebit.__version__} needs torch 2.9 or newer, but torch {version} is installed: "
        f"pip install --upgrade torch"
    )


def test_the_command_says_it_in_one_line_too(tmp_path):
    """With the script that pip writes for it."""
    script = tmp_path / "sparsebit"
    script.write_text("import sys\nfrom sparsebit.cli import main\nsys.exit(main())\n")
    done = with_torch("2.7.1", tmp_path, [str(script), "--version"])
    assert (
        done.returncode == 2
        and not done.stdout
        and done.stderr
        == (
            f"error: sparsebit {sparsebit.__version__} needs torch 2.9 or newer, but torch 2.7.1 is installed: "
            f"pip install --upgrade torch\n"
        )
    )


@pytest.mark.parametrize("version", ["2.9.0", "2.10.0a0+git1", "3.0.0"])
def test_a_torch_that_is_new_enough_is_taken(version, tmp_path):
    done = with_torch(version, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_refusal_and_pyproject_name_the_same_torch():
    assert claimed()["torch"].release == sparsebit._OLDEST_TORCH


def test_the_tested_versions_are_allowed():
    pinned = re.findall(r"^([\w-]+)==(\S+)", text("constraints.txt"), re.M)
    assert {"torch", "onnx", "onnxruntime", "transformers"} <= {name for name, _ in pinned}
    wrong = [name for name, version in pinned if Version(version) < claimed().get(name, Version("0"))]
    assert not wrong


def test_every_place_names_the_same_version():
    assert yaml.safe_load(text("CITATION.cff"))["version"] == sparsebit.__version__
    assert re.search(r"^## (\S+)", text("CHANGELOG.md"), re.M)[1] == sparsebit.__version__


# -- wheel and sdist -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def wheel_of(folder: Path) -> tuple[set[str], dict[str, bytes]]:
    """The files of the package, and what is in those that describe it."""
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = {name.split("/", 1)[1]: archive.read(name) for name in names if ".dist-info/" in name}
    return {name for name in names if ".dist-info/" not in name}, about


def test_the_wheel_holds_the_package_and_nothing_else(dist):
    files, about = wheel_of(dist)
    ours = {str(path.relative_to(SOURCE.parent)) for path in SOURCE.rglob("*") if path.is_file()}
    assert files == {name for name in ours if "__pycache__" not in name}
    assert "sparsebit/py.typed" in files and "licenses/LICENSE" in about
    assert b"sparsebit = sparsebit.cli:main" in about["entry_points.txt"]


def test_the_metadata_says_what_pyproject_says(dist):
    about = message_from_bytes(wheel_of(dist)[1]["METADATA"])
    assert about["Version"] == sparsebit.__version__ and about["License-Expression"] == "Apache-2.0"
    needed = {Requirement(line).name for line in about.get_all("Requires-Dist") if "extra ==" not in line}
    assert needed == {"torch", "numpy", "pydantic", "pyyaml", "rich", "safetensors", "typer"}
    assert {"onnx", "llm", "qlora", "nf4", "gguf", "demo", "docs", "dev"} == set(
        about.get_all("Provides-Extra")
    )


def test_the_sdist_is_enough_to_run_the_tests_and_to_build_the_same_wheel(dist, tmp_path):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    top = {path.name for path in root.iterdir()}
    assert {"src", "tests", "docs", "examples", "benchmarks", "Makefile", "constraints.txt", ".ci"} <= top
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "LICENSE"} <= top
    assert not [path for path in root.rglob("*") if path.name in ("__pycache__", ".venv", ".git", "site")]
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again")]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    assert wheel_of(tmp_path / "again") == wheel_of(dist)


def test_twine_finds_nothing(dist):
    pytest.importorskip("twine")
    files = sorted(map(str, dist.iterdir()))
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == len(files) == 2, done.stdout


def requirements_of(extra: str, lines: list[str]) -> list[Requirement]:
    found = []
    for line in lines:
        needed = Requirement(line)
        if needed.marker is None or not needed.marker.evaluate({"extra": extra}):
            continue
        inner = [part for name in needed.extras for part in requirements_of(name, lines)]
        found += inner if needed.name == "sparsebit" else [needed]
    return found


@pytest.mark.parametrize("extra", ["onnx", "llm", "qlora", "nf4", "gguf", "demo", "docs", "dev"])
def test_every_extra_is_part_of_the_test_environment(extra, dist):
    """So its packages were resolved together, and are in the versions that it asks for."""
    lines = message_from_bytes(wheel_of(dist)[1]["METADATA"]).get_all("Requires-Dist")
    needed = requirements_of(extra, lines)
    assert needed
    installed = {d.name.lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    missing = [str(r) for r in needed if r.name.lower() not in installed]
    if missing:
        pytest.skip(f"{missing[0].partition('>')[0]} is not installed")
    assert not [
        str(r) for r in needed if not r.specifier.contains(installed[r.name.lower()], prereleases=True)
    ]


# -- the files beside them -----------------------------------------------------------------------------------
def test_the_workflow_runs_what_ci_runs():
    (job,) = yaml.safe_load(text(".github/workflows/test.yml"))["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [".ci/run", "make docs", "make dist"] and os.access(ROOT / ".ci/run", os.X_OK)
    targets = set(re.findall(r"^([\w-]+):", text("Makefile"), re.M))
    assert {"test", "docs", "dist", "test-oldest"} <= targets


def reads(tree: ast.AST) -> list[tuple[str, dict[str, str]]]:
    """Calls that may run the code of a file, with their keyword arguments."""
    suspects = {
        "torch.load",
        "np.load",
        "numpy.load",
        "pickle.load",
        "pickle.loads",
        "yaml.load",
        "eval",
        "exec",
    }
    suspects |= {"yaml.unsafe_load", "yaml.full_load", "joblib.load", "torch.jit.load", "marshal.loads"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in suspects:
            options = {word.arg or "**": ast.unparse(word.value) for word in node.keywords}
            found.append((ast.unparse(node), options))
    return found


def test_no_file_is_read_in_a_way_that_runs_code():
    """SECURITY.md says so."""
    seen, wrong = 0, []
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        where = str(path.relative_to(SOURCE))
        if "trust_remote_code" in source:
            wrong.append(f"{where}: trust_remote_code")
        for call, options in reads(ast.parse(source)):
            seen += 1
            is_safe = options.get("weights_only") == "True" or options.get("allow_pickle") == "False"
            is_safe |= call.startswith("yaml.load(") and call.endswith(", _Loader)")
            if (
                not is_safe and where != "quantization/calibration/distributed.py"
            ):  # what other ranks of the job sent
                wrong.append(f"{where}: {call}")
    assert seen >= 6 and not wrong, "\n".join(wrong)


def test_a_call_that_runs_code_is_noticed():
    for line in ("torch.load(f)", "np.load(f, allow_pickle=True)", "pickle.load(f)", "yaml.load(f, Loader)"):
        assert reads(ast.parse(line)), line
