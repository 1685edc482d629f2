"""The table of readers in docs/howto/llm.md is that of the code."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from sparsebit.llm.formats import FORMATS
from sparsebit.llm.readers import READERS, Plan

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "llm.md"
INNER = {"turned"}  # has no name for users: it is what compressed-tensors means for Conv1D layers
PLAN = Plan("compressed-tensors", {}, {}, {})


def table() -> dict[str, list[str]]:
    text = PAGE.read_text("utf-8").partition("| reader | version |")[2]
    rows = [line.strip("|").split("|") for line in text.splitlines()[2:]]
    found = {}
    for row in rows:
        if len(row) != 4:
            break
        found[row[0].strip()] = [cell.strip() for cell in row[1:]]
    return found


def test_every_reader_has_a_row():
    assert set(table()) == {reader.TYPE for reader in READERS.values()} | {"llama.cpp"}


@pytest.mark.parametrize("name", READERS)
def test_formats(name):
    reader = READERS[name]
    assert set(table()[reader.TYPE][1].split(", ")) == set(reader.formats) - INNER
    assert all(name in FORMATS for name in reader.formats)


@pytest.mark.parametrize("name", READERS)
def test_versions(name):
    """Tables of rules say of which version they are; what is run, is the version that is installed."""
    reader = READERS[name]()
    version, _, how = table()[reader.TYPE]
    if how == "by a table of its rules":
        assert f"those of {version};" in reader.missing(PLAN)
    elif not reader.version():
        pytest.skip(f"{reader.TYPE} is not installed")
    else:
        installed = ".".join(reader.version().split(".")[:2])
        assert installed in version.split(", "), f"the page does not know {reader.TYPE} {installed}"


def test_llama_cpp():
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    version = importlib.import_module("llama_cpp").__version__
    assert re.match(r"[\d.]+", table()["llama.cpp"][0])[0] == version
