"""`sparsebit llm quantize` has every option of `llm.quantize` and of its methods, and decides nothing by itself."""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path

import pytest
from llm_files import tiny_llama

from sparsebit import llm
from sparsebit.cli.llm_options import TABLE
from sparsebit.errors import ConfigError
from sparsebit.llm.methods import METHODS

OTHERWISE = {"model": "DIR", "batches": "--data", "save": "--output"}  # keywords that have another form
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed (pip install 'sparsebit[llm]')",
)


def of_methods() -> dict[str, set[str]]:
    """Each option, and the methods that take it."""
    found: dict[str, set[str]] = {}
    for name, method in METHODS.items():
        if method.__module__.startswith("sparsebit."):
            for option in method.options():
                found.setdefault(option, set()).add(name)
    return found


def test_the_table_is_the_api():
    """A new keyword of the API without a row in the table fails here."""
    api = [p.name for p in inspect.signature(llm.quantize).parameters.values() if p.kind is not p.VAR_KEYWORD]
    rows = {row.name: row for row in TABLE}
    assert len(rows) == len(TABLE)
    assert sorted(name for name, row in rows.items() if not row.methods) == sorted({*api} - {*OTHERWISE})
    told = {name: {*row.methods.split(", ")} for name, row in rows.items() if row.methods}
    assert told == of_methods()


def test_every_option_is_in_the_help(sparsebit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = sparsebit("llm quantize --help").out
    names = [*inspect.signature(llm.quantize).parameters, *of_methods()]
    names = [n for n in names if n not in ("options", "model")]
    flags = [OTHERWISE.get(name) or f"--{name.replace('_', '-')}" for name in names]
    assert not [flag for flag in flags if f"{flag} " not in shown]


GIVEN = [
    ("", {}),
    ("--method smoothquant --alpha 0.3", {"method": "smoothquant", "alpha": 0.3}),
    ("--method wanda --pattern 2:4", {"method": "wanda", "pattern": (2, 4)}),
    ("--asymmetric --no-act-order --spill tmp", {"symmetric": False, "act_order": False, "spill": True}),
    ("--symmetric --rotate --blocks a.b", {"symmetric": True, "rotate": True, "blocks": "a.b"}),
    ("--candidate-bits 2,4 --average-bits 3", {"candidate_bits": (2, 4), "average_bits": 3.0}),
]


@needs_transformers
@pytest.mark.parametrize("words, expected", GIVEN)
def test_only_what_was_said_is_passed_on(llama, tmp_path, sparsebit, monkeypatch, words, expected):
    got = {}

    def instead(source, batches, **keywords):
        got.update(keywords)
        raise ConfigError("seen")

    monkeypatch.setattr(llm, "quantize", instead)
    (tmp_path / "config.json").write_text("{}")
    assert sparsebit(f"llm quantize {tmp_path} -o {tmp_path / 'out'} {words}").code == 2
    assert got == {"save": tmp_path / "out", **expected}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@needs_transformers
@pytest.mark.parametrize("words, settings", [
    ("--method smoothquant", {"bits": 8, "format": "int-quantized"}),
    ("--method sparsegpt", {"format": "dense", "options": {}}),
    ("--method wanda", {"format": "dense", "options": {}}),
    ("--method sparsegpt --ratio 0.4", {"format": "dense", "options": {"ratio": 0.4}}),
    ("--method wanda --pattern 2:4", {"format": "dense"}),
    ("--bits 2 --group-size 32", {"bits": 2, "format": "compressed-tensors"}),
    ("--method awq --group-size 32 --points 3", {"bits": 4, "symmetric": True}),
])  # fmt: skip
def test_methods_by_their_names(llama, tmp_path, sparsebit, words, settings):
    data = f"--data {llama / 'text.txt'} --samples 4 --length 32"
    done = sparsebit(f"llm quantize {llama / 'model'} {data} -o {tmp_path / 'out'} {words}")
    assert done.code == 0, done.err
    run = json.loads((tmp_path / "out" / "run.json").read_text())["run"]
    assert {key: run[key] for key in settings} == settings
    told = done.out.splitlines()
    assert any(line.startswith("perplexity ") for line in told) and (tmp_path / "out" / "README.md").is_file()
    if settings["format" if "format" in settings else "bits"] == "dense":
        assert f"with {100 * run['options'].get('ratio', 0.5):.1f}% zeros" in told[0]
