"""The report of a run: complete, self-contained, well-formed, and safe to show."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from sparsebit.report import FORMATS, render

VOID = {"meta", "rect"}


class Page(HTMLParser):
    """Tags must close in order; collects text by tag."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())


@pytest.fixture
def run(runs, tmp_path, sparsebit):
    """A copy of the quantized run, with its profile."""
    folder = tmp_path / "q"
    shutil.copytree(runs / "q", folder)
    assert sparsebit("profile", folder).code == 0
    return folder


def test_the_page_is_whole(run):
    page = Page((run / "report.html").read_text("utf-8"))  # written by quantize, and again by profile
    assert not page.open
    layers = [row["name"] for row in json.loads((run / "layers.json").read_text())["rows"]]
    assert set(layers) <= set(page.texts["td"])
    profile = json.loads((run / "profile.json").read_text())
    worst = profile["rows"][0]
    assert page.texts["text"][0] == worst["name"]  # the longest bar
    assert f"{profile['total']:.1f} dB" in page.texts["dd"]
    assert any(line.startswith("holds") for line in page.texts["td"])
    for title in ("Error per layer", "Layers", "Certificate", "Settings"):
        assert title in page.texts["h2"]


def test_bars_are_shares_of_noise(run):
    """Widths against the formula, written down again: noise = 10^(-SQNR/10), the worst fills the width."""
    rows = json.loads((run / "profile.json").read_text())["rows"]
    noise = sorted((10 ** (-row["effect"] / 10) for row in rows), reverse=True)
    widths = [float(w) for w in re.findall(r'<rect [^>]*width="([\d.]+)%"', render(run))]
    assert widths == pytest.approx([100 * n / noise[0] for n in noise], abs=0.31)


def test_nothing_comes_from_the_network(run):
    text = render(run)
    assert not re.findall(r"https?://", text)
    assert not [value for key, value in Page(text).attributes if key in ("src", "href")]
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_names_cannot_inject_markup(run):
    about = json.loads((run / "run.json").read_text())
    about["inputs"]["model"] = "<script>alert(1)<script>.py:build"
    (run / "run.json").write_text(json.dumps(about))
    assert "<script>alert" not in render(run) and "&lt;script&gt;alert" in render(run)


@pytest.mark.parametrize("style", FORMATS)
def test_formats(run, sparsebit, style):
    done = sparsebit("report", run, "--format", style, "--json")
    path = json.loads(done.out)["file"]
    assert done.code == 0 and path.endswith(f"report.{style}")
    text = (run / f"report.{style}").read_text("utf-8")
    assert "_0" in text and "W8 A8" in text
    if style == "json":
        assert json.loads(text)["layers"][0]["own"] > 0


@pytest.mark.parametrize("style", FORMATS)
def test_pruned_runs(runs, style):
    text = render(runs / "p", style)
    assert "8" in text and re.search(r"stays|before|pruned", text)
    if style == "html":
        page = Page(text)
        assert page.texts["td"][:4] == ["0", "8", "4", "50 %"]


def test_a_run_without_profile_says_how(runs, tmp_path):
    shutil.copytree(runs / "q", tmp_path / "q", ignore=shutil.ignore_patterns("profile.json", "model.onnx"))
    text = render(tmp_path / "q", "md")
    assert f"sparsebit profile {tmp_path / 'q'}" in text


def test_an_unfinished_run(tmp_path):
    about = {
        "command": "quantize",
        "inputs": {"model": "n.py:b"},
        "settings": {},
        "steps": {},
        "sparsebit": "1",
    }
    (tmp_path / "run.json").write_text(json.dumps(about))
    for style in FORMATS:
        assert "not finished" in render(tmp_path, style)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_it_renders_in_chromium(run, tmp_path):
    """The page in a browser, without JavaScript errors, also narrow; sorting adds a button per column."""
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'chrome'}",
        "--window-size=400,900", "--dump-dom", f"file://{run / 'report.html'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("<button>") == 10
