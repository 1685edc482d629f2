"""The report of a run: complete, self-contained, well-formed, and safe to show."""

from __future__ import annotations

import json
import os
import re
import shutil
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

from sparsebit.cli.runs import other_work
from sparsebit.cli.runs.compare import lines
from sparsebit.report import FORMATS, render

VOID = {"meta", "rect", "input", "br"}


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
    assert {"_0", "_3", "_7"} <= set(page.texts["b"])  # the histograms
    assert f"{profile['total']:.1f} dB" in page.texts["dd"]
    assert any(line.startswith("holds") for line in page.texts["td"])
    for title in ("Error per layer", "Graph", "Layers", "Ranges", "Certificate", "Settings"):
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
    links = [str(value) for key, value in Page(text).attributes if key in ("src", "href")]
    assert links and all(link.startswith("#layer-") for link in links)
    ids = {value for key, value in Page(text).attributes if key == "id"}
    assert {link[1:] for link in links} <= ids
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


# -- what was measured -----------------------------------------------------------------------------------
def test_histograms_against_numpy(run):
    """Counts and clipping of a weight, from the file of weights by another library."""
    from safetensors.torch import load_file

    found = json.loads((run / "histograms.json").read_text())
    weights = load_file(run / "model.safetensors")
    name = "_7.weight_quantizer"
    key = next(k for k in weights if weights[k].shape == (5, 32))
    w, scale = (
        weights[key].double().numpy(),
        weights[key.replace(".weight", ".weight_quantizer.scale")].numpy(),
    )
    counts, edges = np.histogram(w, bins=64)
    assert found[name]["from"] == pytest.approx(edges[0]) and found[name]["to"] == pytest.approx(edges[-1])
    assert np.abs(np.cumsum(counts) - np.cumsum(found[name]["counts"])).max() <= 1  # float32 at a border
    assert found[name]["range"][1] == pytest.approx(127 * scale.max(), rel=1e-5)
    assert found[name]["clipped"] == 0  # minmax per channel


def test_clipping_is_measured(sparsebit, work):
    """A percentile that cuts off a tenth of the activations on purpose."""
    sets = "--set A.OBSERVER.TYPE=percentile --set A.OBSERVER.PERCENTILE.ALPHA=0.1"
    done = sparsebit(f"quantize net.py:build --data x.npy --batch-size 12 --no-export {sets} -o run")
    assert done.code == 0, done.err
    first = json.loads((work / "run/histograms.json").read_text())["_0.input_quantizer"]
    x = np.load("x.npy")
    low, high = first["range"]
    step = (high - low) / 255
    assert first["clipped"] == pytest.approx(((x < low - step) | (x > high + step)).mean(), abs=0.01)
    assert first["clipped"] > 0.05 and sum(first["counts"]) == x.size


def test_the_graph_is_the_model(run):
    graph = json.loads((run / "graph.json").read_text())
    names = [node["name"] for node in graph["nodes"]]
    assert names == ["input_1", "_0", "_2", "_3", "_4", "_5", "_6", "_7", "output"]
    assert graph["edges"] == [[i, i + 1] for i in range(8)]
    text = render(run)
    assert text.count('class="op') == 7 and text.count('class="io') == 2
    assert "```mermaid" in render(run, "md")


def test_latency_is_in_every_format(run, sparsebit):
    facts = json.loads((run / "run.json").read_text())["steps"]["latency"]
    assert facts["milliseconds"]["float"] > 0 and facts["milliseconds"]["new"] > 0 and facts["batch"] == 1
    text = f"{facts['milliseconds']['float']:.3g} → {facts['milliseconds']['new']:.3g} ms"
    for style in FORMATS:
        assert text in render(run, style) and f"{facts['cores']} core" in render(run, style)


def test_times_of_a_busy_machine_say_so(run):
    """On the page, and on the screen; a machine that has next to nothing else to do is not spoken of."""
    about = json.loads((run / "run.json").read_text())
    facts = about["steps"]["latency"]
    for cores, words in ((1.26, "other programs took 1.3 cores meanwhile"), (0.1, ""), (None, "")):
        facts["others"] = cores
        (run / "run.json").write_text(json.dumps(about))
        shown = "\n".join(lines({"latency": facts}))
        for text in (shown, render(run), render(run, "md")):
            assert ("other programs" in text) == bool(words) and words in text


def test_other_programs_are_measured(tmp_path, monkeypatch):
    """Three seconds of all cores within two, half a second of them by this process; idle and waiting are no work."""
    stat, ticks = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    clock, own = iter([10.0, 12.0]), iter([7.0, 7.5])
    monkeypatch.setattr(other_work, "STAT", stat)
    monkeypatch.setattr(other_work, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(other_work, "_of_this", lambda: next(own))
    stat.write_text(f"cpu  {50 * ticks} 0 0 900 80 0 0 0 0 0\ncpu0 1 1 1\n")
    measured = other_work.OtherWork()
    stat.write_text(f"cpu  {52 * ticks} 0 {ticks} 1900 180 0 0 0 0 0\ncpu0 1 1 1\n")
    assert measured.cores() == 1.25


def test_a_system_that_does_not_say_what_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr(other_work, "STAT", tmp_path / "nothing")
    assert other_work.OtherWork().cores() is None


def test_top1_of_labels(sparsebit, work):
    """Against the same count, done here."""
    import torch

    from sparsebit.cli.inputs.models import load_model

    assert sparsebit("quantize net.py:build --data xy.npz --no-export -o run").code == 0
    data = np.load("xy.npz")
    model = load_model("net.py:build")
    with torch.no_grad():
        right = (model(torch.tensor(data["images"])).argmax(1).numpy() == data["labels"]).mean()
    facts = json.loads((work / "run/run.json").read_text())["steps"]["metric"]
    assert (
        facts["name"] == "top-1" and facts["float"] == pytest.approx(100 * right) and facts["samples"] == 12
    )
    assert f"{100 * right:.2f} → {facts['new']:.2f} %" in (work / "run/report.html").read_text("utf-8")


METRIC = """

def calls(model, batches):
    return 10 * len(batches) + ("Quant" in type(model).__name__)
"""


def test_a_metric_of_ones_own(sparsebit, work):
    with (work / "net.py").open("a") as file:
        file.write(METRIC)
    command = "quantize net.py:build --data x.npy --batch-size 4 --no-export --metric net.py:calls -o run"
    done = sparsebit(command)
    assert done.code == 0 and "calls        30 -> 31" in done.out
    for style, text in (("html", "30 → 31"), ("md", "30 → 31"), ("json", '"new": 31')):
        assert text in render(work / "run", style)
    assert (
        sparsebit(command.replace("--metric net.py:calls", "--resume")).code == 2
    )  # was started with a metric


def test_pruned_runs_are_compared(runs):
    steps = json.loads((runs / "p/run.json").read_text())["steps"]
    assert steps["latency"]["milliseconds"]["new"] > 0
    assert "Latency" in render(runs / "p", "md")


def test_bars_of_channels(runs):
    """8 channels of the first layer go to 4; the widest, 32 inputs of the last, fill the width."""
    widths = re.findall(r'<rect (?:class="was" )?x="0" y="\d+" width="([\d.]+)%"', render(runs / "p"))
    assert widths[:2] == ["25.00", "12.50"] and widths[-2:] == ["100.00", "50.00"]


def test_kernels_of_the_file_count_more_than_expectations(run):
    path = run / "model.report.json"
    report = json.loads(path.read_text())
    report["why_float"] = {"3 (Conv)": "its output is read in float"}
    path.write_text(json.dumps(report))
    layers = {x["path"]: x for x in json.loads(render(run, "json"))["layers"]}
    assert layers["3"]["integer"] is False and layers["3"]["backend"] == "its output is read in float"
    assert layers["0"]["integer"] is True


# -- layout ----------------------------------------------------------------------------------------------
def test_layout_has_no_overlaps_and_flows_down():
    from report_graphs import transformer

    from sparsebit.report.formats import _graph

    graph = transformer(blocks=42)
    places, width, height = _graph.layout(graph)
    assert len(graph.nodes) > 500 and 1 < width / height < 3
    assert len({(p.x, p.y) for p in places}) == len(places)
    for p in places:
        assert 0 <= p.x <= width - _graph.WIDTH and 0 <= p.y <= height - _graph.HEIGHT
        beside = [q.x for q in places if q.y == p.y and q is not p and q.gutter == p.gutter]
        assert all(abs(x - p.x) >= _graph.WIDTH for x in beside)
    for a, b in graph.edges:
        assert (places[a].gutter, places[a].y) < (places[b].gutter, places[b].y)
