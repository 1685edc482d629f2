"""The report in a browser: no JavaScript errors, sorting and zoom work, a phone needs no sideways scrolling.

Screenshots go to SPARSEBIT_SCREENSHOTS, or into the test's own folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from html import escape, unescape
from pathlib import Path

import pytest
from browser import CHROMIUM, dom, screenshot
from report_graphs import large

from sparsebit.report import render
from sparsebit.report.formats.html import as_html

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: apt-get install chromium)"),
]
PHONE, DESK = (390, 2400), (1200, 2600)

# runs at the end of the page: uses it as a person would, and writes down what happened
PROBE = """<script>
const seen = { errors: failures, width: document.documentElement.scrollWidth, window: innerWidth };
const table = document.querySelector('#layers table');
const column = i => [...table.tBodies[0].rows].map(row => row.cells[i].textContent);
const head = name => [...table.tHead.rows[0].cells].findIndex(th => th.textContent === name);
if (table) {
  const macs = head('MACs');
  const press = () => table.tHead.rows[0].cells[macs].querySelector('button').click();
  press(); seen.up = column(macs); press(); seen.down = column(macs);
}
const graph = document.querySelector('.graph svg');
if (graph) {
  const before = graph.getBoundingClientRect().width;
  document.querySelector('.by button').click();
  seen.zoom = graph.getBoundingClientRect().width / before;
  for (let i = 0; i < 6; i++) document.querySelector('.by button').click();
  const view = document.querySelector('.graph');
  view.scrollTo(0, 0);
  view.dispatchEvent(new MouseEvent('mousedown', { clientX: 300, clientY: 300 }));
  dispatchEvent(new MouseEvent('mousemove', { clientX: 180, clientY: 300 }));
  dispatchEvent(new MouseEvent('mouseup'));
  seen.dragged = view.scrollLeft;
  document.querySelector('#by-bits').click();
  const box = document.querySelector('.b8 rect, .b4 rect');
  seen.colours = [getComputedStyle(box).fill, getComputedStyle(document.querySelector('.io rect')).fill];
  seen.boxes = document.querySelectorAll('.graph rect').length;
}
parent.document.querySelector('#seen').textContent = JSON.stringify(seen);
</script>"""
CATCH = "<script>const failures = []; addEventListener('error', e => failures.push(e.message));</script>"


def use(page: str, folder: Path, size: tuple[int, int] = DESK) -> dict:
    """Open the page, work with it, and say what was seen. In a frame: windows are never narrower than 500 pixels."""
    inner = escape(page.replace("<head>", f"<head>{CATCH}").replace("</body>", f"{PROBE}</body>"))
    frame = f'<iframe width="{size[0]}" height="{size[1]}" style="border: 0" srcdoc="{inner}"></iframe>'
    file = folder / "probed.html"
    file.write_text(f'<!DOCTYPE html>\n<meta charset="utf-8">\n<pre id="seen"></pre>{frame}', "utf-8")
    found = re.search(r'<pre id="seen">(.+?)</pre>', dom(file, folder, DESK))
    assert found, "the script at the end of the page did not run"
    return json.loads(unescape(found.group(1)))


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    from sparsebit.cli import main

    folder = tmp_path_factory.mktemp("page") / "q"
    shutil.copytree(runs / "q", folder)
    assert main(["profile", str(folder)]) == 0
    return render(folder)


def number(text: str) -> float:
    """43.4 M -> 43400000."""
    digits, _, unit = text.partition(" ")
    return float(digits) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[unit]


def test_it_can_be_used(page, tmp_path):
    seen = use(page, tmp_path)
    assert not seen["errors"]
    counts = [number(text) for text in seen["up"] if text]
    assert counts == sorted(counts) and len(counts) >= 3 and seen["up"][-1] == ""  # empty cells stay below
    assert [number(text) for text in seen["down"] if text] == sorted(counts, reverse=True)
    assert seen["zoom"] == pytest.approx(1.4, abs=0.02)
    assert seen["dragged"] == pytest.approx(120, abs=2)
    assert seen["colours"][0] != seen["colours"][1]


@pytest.mark.parametrize("name", ["quantized", "pruned", "large"])
def test_a_phone_needs_no_sideways_scrolling(page, runs, tmp_path, name):
    pages = {
        "quantized": lambda: page,
        "pruned": lambda: render(runs / "p"),
        "large": lambda: as_html(large()),
    }
    seen = use(pages[name](), tmp_path, PHONE)
    assert seen["window"] == 390 and seen["width"] <= 390 and not seen["errors"]


def test_five_hundred_nodes(tmp_path):
    seen = use(as_html(large()), tmp_path)
    assert seen["boxes"] > 500 and not seen["errors"]


def test_without_javascript(page, tmp_path):
    """Everything is in the page itself; colours of the graph are chosen by CSS."""
    bare = tmp_path / "bare.html"
    bare.write_text(re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL), "utf-8")
    text = dom(bare, tmp_path, DESK)
    assert "<script" not in text and "<button" not in text
    for part in ("Parameters", "What to try next", "Graph", "Layers", "Ranges", "Certificate"):
        assert part in text


SHOTS = {"light": (DESK, False), "dark": (DESK, True), "phone": (PHONE, False), "phone-dark": (PHONE, True)}


@pytest.mark.parametrize("name", SHOTS)
def test_screenshots(page, tmp_path, name):
    """Pages that are really drawn: the background of the theme, and a lot that is not background."""
    image = pytest.importorskip("PIL.Image")
    size, dark = SHOTS[name]
    file = tmp_path / "report.html"
    file.write_text(page, "utf-8")
    folder = Path(os.environ.get("SPARSEBIT_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    screenshot(file, folder / f"report-{name}.png", tmp_path, size, dark)
    with image.open(folder / f"report-{name}.png") as opened:
        shot = opened.convert("L")
    assert shot.size == size
    corner = shot.getpixel((2, 2))
    assert corner < 60 if dark else corner > 240
    other = sum(shot.histogram()[: corner - 20] if not dark else shot.histogram()[corner + 20 :])
    assert other > 0.01 * size[0] * size[1]
