"""The examples run, and show what they say they show."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

pytest.importorskip("sklearn")


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Loads an example; on one thread, because tiny layers on a busy machine are ten times slower on two."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda name: runpy.run_path(str(EXAMPLES / name))
    torch.set_num_threads(threads)


def test_mixed_precision(example, capsys):
    """Bits for the sensitive layers: better than 4 bits everywhere, smaller than 8 bits everywhere."""
    results = example("mixed_precision.py")["main"](epochs=2)
    percent, decibel, size = results["mixed"]
    assert percent > 90
    assert results["w4a8"][1] < decibel < results["w8a8"][1]
    assert results["w4a8"][2] < size < results["w8a8"][2]
    assert "dB left" in capsys.readouterr().out


def test_classic_script(example, tmp_path, capsys):
    script = example("classic_script.py")
    (tmp_path / "qconfig.yaml").write_text(script["QCONFIG"])
    results = script["main"](tmp_path / "qconfig.yaml", epochs=2)
    assert results["quantized"] > results["float"] - 3
    assert results["loaded"] == results["quantized"] > 90
    assert "int4" in capsys.readouterr().out


def test_every_example_has_a_test():
    here = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f'example("{path.name}")' not in here] == []
