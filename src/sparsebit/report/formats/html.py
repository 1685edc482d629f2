"""One self-contained page: no network, light and dark, readable on a phone; without JavaScript only sorting and zoom
are lost."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from sparsebit.report.facts import Facts, Layer
from sparsebit.report.figures import count, decibel, size
from sparsebit.report.formats import FORMATS
from sparsebit.report.formats._graph import draw
from sparsebit.report.formats._histograms import cards
from sparsebit.report.formats._style import CSS, SORT, ZOOM

BARS = 15  # layers in the chart; the table has all
ROW = 34  # pixels

Cell = tuple[str, float | None]  # text, and the number to sort by


@FORMATS.register("html")
def as_html(facts: Facts) -> str:
    body = "\n".join(part for part in _parts(facts) if part)
    title = escape(f"{facts.command} {facts.title}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} - Sparsebit</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{title}</h1>\n{body}\n"
        f"<footer>Written by Sparsebit {escape(facts.version)}.</footer>\n</main>\n"
        f"<script>{SORT}{ZOOM}</script>\n</body>\n</html>\n"
    )


def _parts(facts: Facts) -> Iterator[str]:
    yield _tiles(facts)
    yield f'<p class="bad warning">✗ {escape(facts.warning)}</p>' if facts.warning else ""
    yield _section("What to try next", _fixes(facts))
    measured = [x for x in facts.layers if x.noise is not None]
    yield _section("Error per layer", _chart(measured))
    yield _section("Graph", _graph(facts))
    yield _section("Layers", _layers(facts.layers))
    yield _section("Where the time goes", _time(facts))
    yield _section("Ranges", cards(facts.layers))
    yield _section("Channels before and after", _channels(facts))
    yield _section("Certificate", _certificate(facts))
    yield _section("Notes", _items(map(escape, facts.notes)))
    yield _section("Settings", _settings(facts))


def _section(title: str, content: str) -> str:
    anchor = title.lower().replace(" ", "-")
    if content:
        return f'<section id="{anchor}">\n<h2>{title}</h2>\n{content}\n</section>'
    return ""


def _items(lines: Iterable[str]) -> str:
    found = "\n".join(f"<li>{line}</li>" for line in lines)
    return f"<ul>\n{found}\n</ul>" if found else ""


def _tiles(facts: Facts) -> str:
    tiles = []
    for label, value, remark in facts.headline:
        failed = " failed" if label in facts.alarming else ""
        tiles.append(
            f'<div class="tile{failed}"><dt>{escape(label)}</dt><dd>{escape(value)}</dd><p>{escape(remark)}</p></div>'
        )
    if tiles:
        return f'<dl class="tiles">\n{chr(10).join(tiles)}\n</dl>'
    return ""


def _fixes(facts: Facts) -> str:
    fixes = []
    for x in facts.hurt_most:
        fixes.append(
            f"<b>{escape(x.name)}</b> alone leaves {decibel(x.effect)} at the output. Its own output goes from "
            f"{decibel(x.own)} to {decibel(x.fixed)} with <code>{escape(x.fix)}</code>"
        )
    todo = [re.sub("`(.*?)`", r"<code>\1</code>", escape(text)) for text in facts.todo]
    return _items([*fixes, *todo])


# -- chart -----------------------------------------------------------------------------------------------
def _chart(layers: Sequence[Layer]) -> str:
    """Bars in per cent of the width: the text keeps its size on a phone."""
    ranked = sorted(layers, key=lambda x: -(x.noise or 0))[:BARS]
    if not ranked:
        return ""
    longest = ranked[0].noise or 1.0
    bars = "\n".join(_bar(i, x, longest) for i, x in enumerate(ranked))
    left_out = ""
    if len(layers) > BARS:
        left_out = f" The {BARS} worst of {len(layers)} are shown."
    return (
        f"<p>The share of each layer in the noise at the output, measured with one layer quantized at a time."
        f"{left_out}</p>\n"
        f'<svg class="chart" role="img" aria-label="Noise at the output by layer" width="100%" '
        f'height="{ROW * len(ranked)}">\n{bars}\n</svg>'
    )


def _bar(i: int, layer: Layer, longest: float) -> str:
    share = layer.noise or 0.0
    width = 100 * share / longest
    top = ROW * i
    label = f"{escape(layer.name)} <tspan>{100 * share:.1f} %, {decibel(layer.effect)}</tspan>"
    tip = escape(f"{layer.path} ({layer.op}, {layer.bits}): {decibel(layer.effect)} at the output")
    return (
        f'<g><title>{tip}</title><text x="0" y="{top + 13}">{label}</text>'
        f'<rect x="0" y="{top + 18}" width="{max(width, 0.3):.2f}%" height="9" rx="2"/></g>'
    )


# -- graph -----------------------------------------------------------------------------------------------
KEYS = {
    "error": (
        ("n0", "below 1 %"),
        ("n1", "1 %"),
        ("n2", "3 %"),
        ("n3", "10 %"),
        ("n4", "20 % of the noise and more"),
    ),
    "bits": (("b2", "up to 3 bits"), ("b4", "4"), ("b6", "5 to 7"), ("b8", "8"), ("b16", "more")),
}


def _graph(facts: Facts) -> str:
    """Radio buttons choose the colours, in CSS alone; the script adds buttons to zoom."""
    if facts.graph is None:
        return ""
    measured = any(x.noise is not None for x in facts.layers)
    ways = [way for way in KEYS if measured or way != "error"]
    radios = "".join(
        f'<label><input type="radio" name="by" id="by-{way}"{" checked" if way == ways[0] else ""}> {way}</label>'
        for way in ways
    )
    rows = {x.name: i for i, x in enumerate(facts.layers)}
    svg = draw(facts.graph, {x.name: x for x in facts.layers}, rows)
    keys = "".join(
        f'<div class="key {way}">'
        + "".join(
            f'<span style="--c: var(--{colour})">{text}</span>'
            for colour, text in KEYS[way]
            if way == "error" or f' {colour}"' in svg
        )
        + "</div>"
        for way in ways
    )
    return f'<div class="by">Colour by {radios}{keys}</div>\n<div class="graph" tabindex="0">\n{svg}\n</div>'


# -- tables ----------------------------------------------------------------------------------------------
WORDS = ' class="words"'


def _layers(layers: Sequence[Layer]) -> str:
    head = ["layer", "op", "bits", "output SQNR", "own SQNR", "bytes", "MACs", "integers", "range"]
    head += ["clipped", "scheme"]
    rows: list[list[Cell]] = []
    for x in layers:
        runs = "yes" if x.integer else x.backend
        rows.append(
            [
                (x.name, None),
                (x.op, None),
                (x.bits or x.state, None),
                (decibel(x.effect), x.effect),
                (decibel(x.own), x.own),
                (f"{size(x.bytes)} → {size(x.quantized_bytes)}" if x.bytes else "", x.bytes),
                (count(x.macs) if x.macs else "", x.macs),
                (runs, None),
                (x.range.replace(" … ", "\u00a0…\u00a0"), None),
                (x.clipped, None),
                (x.scheme or x.how, None),
            ]
        )
    return _table(head, rows, "layer")


def _channels(facts: Facts) -> str:
    rows: list[list[Cell]] = []
    for name, before, after in facts.pruned:
        rows.append(
            [
                (name, None),
                (str(before), before),
                (str(after), after),
                (f"{100 * after / before:.0f} %", after / before),
            ]
        )
    if not rows:
        return ""
    return _channel_bars(facts.pruned) + _table(["layer", "before", "after", "stays"], rows)


def _channel_bars(pruned: Sequence[tuple[str, int, int]]) -> str:
    """Bars of the kept channels over the original ones; the widest layer fills the width."""
    widest = max(before for _, before, _ in pruned)
    cut_most = sorted(pruned, key=lambda row: row[2] - row[1])[:BARS]
    shown = [row for row in pruned if row in cut_most]
    bars = []
    for i, (name, before, after) in enumerate(shown):
        top = ROW * i
        bars.append(
            f'<g><text x="0" y="{top + 13}">{escape(name)} <tspan>{before} → {after}</tspan></text>'
            f'<rect class="was" x="0" y="{top + 18}" width="{100 * before / widest:.2f}%" height="9" rx="2"/>'
            f'<rect x="0" y="{top + 18}" width="{100 * after / widest:.2f}%" height="9" rx="2"/></g>'
        )
    left_out = ""
    if len(pruned) > BARS:
        left_out = f"<p>The {BARS} that were cut most, of {len(pruned)}.</p>"
    return (
        f'{left_out}<svg class="chart" role="img" aria-label="Channels by layer" width="100%" '
        f'height="{ROW * len(shown)}">\n{chr(10).join(bars)}\n</svg>\n'
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[Cell]], anchor: str = "row") -> str:
    if not rows:
        return ""
    used = []
    for i in range(len(head)):
        if any(row[i][0] for row in rows):
            used.append(i)
    head = [head[i] for i in used]
    rows = [[row[i] for i in used] for row in rows]
    titles = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "\n".join(
        f'<tr id="{anchor}-{i}">' + "".join(map(_cell, row)) + "</tr>" for i, row in enumerate(rows)
    )
    return (
        f'<div class="wide" tabindex="0">\n<table>\n<thead><tr>{titles}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody>\n</table>\n</div>"
    )


def _cell(cell: Cell) -> str:
    text, number = cell
    if number is not None:
        return f'<td data-n="{number}">{escape(text)}</td>'
    breaks = len(text) > 20 and " " in text  # over two lines, so that the columns behind it can be seen
    return f"<td{WORDS if breaks else ''}>{escape(text)}</td>"


def _time(facts: Facts) -> str:
    """The ops of the file that take longest, and why those that are float have no integer kernel."""
    where = (facts.latency or {}).get("where")
    if not where or not where["integer_time"]:  # an ordinary model: nothing is in integers
        return ""
    shares = (
        f"{where['integer_time']:.0%} of the time and {where['integer_macs']:.0%} of the MACs are in integer kernels; "
        f"{where['borders']:.0%} of the time is spent at their borders."
    )
    rows = [[(op["about"], None), (f"{op['microseconds']:.0f}", op["microseconds"])] for op in where["most"]]
    return f"<p>{shares}</p>\n" + _table(["op", "microseconds"], rows, "time")


def _certificate(facts: Facts) -> str:
    if not facts.certificate and not facts.failure:
        return ""
    rows = [line.partition("  ") for line in facts.certificate]
    lines = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v.strip())}</td></tr>\n" for k, _, v in rows)
    verdict = '<p class="good">✓ the file was run, and does what the model does</p>'
    if facts.failure:
        verdict = f'<p class="bad">✗ {escape(facts.failure)}</p>'
    return f'{verdict}\n<table class="facts">\n{lines}</table>'


def _settings(facts: Facts) -> str:
    from sparsebit.config import write_yaml

    text = write_yaml(facts.settings.get("config") or facts.settings)
    return f"<details><summary>as used</summary><pre>{escape(text)}</pre></details>"
