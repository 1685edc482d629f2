"""Tables and charts of the pages say what docs/figures/*.json says; `python benchmarks/charts.py` rewrites them."""

from __future__ import annotations

import json
import re

import pytest

import charts
import figures
from docs_pages import ROOT, name_of
from sparsebit.quantization.presets import presets

STORED = sorted(figures.FOLDER.glob("*.json"))


@pytest.mark.parametrize("name", charts.CHARTS)
def test_charts_are_those_of_the_figures(name):
    drawn = (charts.PICTURES / name).read_text("utf-8")
    assert drawn == charts.CHARTS[name](), "run: python benchmarks/charts.py"


@pytest.mark.parametrize("page", charts.PAGES, ids=name_of)
def test_tables_are_those_of_the_figures(page):
    assert charts.with_tables(page) == page.read_text("utf-8"), "run: python benchmarks/charts.py"


def test_every_table_has_a_place():
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    assert sorted(re.findall(r"<!-- table: (.*) -->", text)) == sorted(charts.TABLES)
    assert all(picture in text for picture in charts.CHARTS)


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_figures_say_where_they_are_from(file):
    found = json.loads(file.read_text("utf-8"))
    assert {"command", "date", "commit", "cpu", "load", "others", "versions"} <= set(found) and found["rows"]
    script = found["command"].split()[1]
    assert (ROOT / script).is_file()
    assert file.stem in {stored for stored, _ in charts.TABLES.values()}


def test_every_preset_has_a_reason():
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    rows = [line for line in text.partition("## Why each preset")[2].splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert not set(presets()) - named


def test_a_table_is_put_between_its_marks():
    text = "a\n<!-- table: x -->\nold\n<!-- end table -->\nb\n<!-- table: y -->\n<!-- end table -->\n"
    found = figures.filled(text, "x", figures.table(["k", "v"], [["1", "2"]]))
    assert found == text.replace("old", "| k | v |\n| --- | --- |\n| 1 | 2 |")


def test_bars_grow_with_their_values():
    drawn = charts.bars("t < u", [("a", 1.0, "one", True), ("b", 2.0, "two", False)], "n")
    widths = [float(w) for w in re.findall(r'<rect x="\d+" y="\d+" width="([\d.]+)"', drawn)]
    assert widths[1] == pytest.approx(2 * widths[0]) and "t &lt; u" in drawn
