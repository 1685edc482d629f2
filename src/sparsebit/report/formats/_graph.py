"""The graph as SVG, without a layout engine: longest-path layers, ordered by the mean place of their inputs.

Networks are mostly chains, so the layers are folded into columns, like the text of a newspaper. Edges to the next
layer are curves; longer ones swing out to the side, those into another column run through the gutter before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from sparsebit.report.facts import Graph, Layer
from sparsebit.report.figures import decibel

WIDTH = 152  # of a box
HEIGHT = 34
SLOT = WIDTH + 12
ROW = HEIGHT + 20
GUTTER = 44
ASPECT = 1.7  # of the whole picture
LETTERS = 23  # of a name in a box
NOISE = (0.01, 0.03, 0.1, 0.2)  # borders of the classes e0 ... e4, shares of the noise of all layers


@dataclass
class Place:
    x: float
    y: float
    gutter: float  # behind its column


def draw(graph: Graph, layers: dict[str, Layer], rows: dict[str, int]) -> str:
    """`rows` are the places of layers in the table, to link to."""
    places, width, height = layout(graph)
    edges = "".join(_edge(places[a], places[b]) for a, b in graph.edges)
    boxes = "\n".join(
        _box(name, op, place, layers.get(name), rows.get(name))
        for (name, op), place in zip(graph.nodes, places)
    )
    return (
        f'<svg role="img" aria-label="The graph of the model" width="{width:.0f}" viewBox="0 0 {width:.0f} '
        f'{height:.0f}">\n<path class="edges" d="{edges}"/>\n{boxes}\n</svg>'
    )


# -- where boxes go --------------------------------------------------------------------------------------
def layout(graph: Graph) -> tuple[list[Place], float, float]:
    """A place for every node, and the size of the picture."""
    ranks = _ranks(graph)
    order = _ordered(graph, ranks)
    fold = min(range(1, len(order) + 1), key=lambda n: _misfit(order, n))
    places = [Place(0.0, 0.0, 0.0) for _ in graph.nodes]
    left = GUTTER / 2
    for start in range(0, len(order), fold):
        part = order[start : start + fold]
        widest = max(map(len, part))
        for i, nodes in enumerate(part):
            indent = (widest - len(nodes)) * SLOT / 2
            for j, node in enumerate(nodes):
                places[node] = Place(left + indent + j * SLOT, 20 + i * ROW, left + widest * SLOT)
        left += widest * SLOT + GUTTER
    return places, left, 20 + min(fold, len(order)) * ROW


def _ranks(graph: Graph) -> list[int]:
    """The longest way from an input; nodes are in the order they run."""
    ranks = [0] * len(graph.nodes)
    for a, b in sorted(graph.edges, key=lambda edge: edge[1]):
        ranks[b] = max(ranks[b], ranks[a] + 1)
    return ranks


def _ordered(graph: Graph, ranks: list[int]) -> list[list[int]]:
    """Layers of nodes, left to right."""
    rows: list[list[int]] = [[] for _ in range(max(ranks, default=0) + 1)]
    for node, rank in enumerate(ranks):
        rows[rank].append(node)
    sources: dict[int, list[int]] = {}
    for a, b in graph.edges:
        sources.setdefault(b, []).append(a)
    place = dict.fromkeys(range(len(graph.nodes)), 0.0)
    for row in rows:
        mean = {}
        for n in row:
            mean[n] = sum(place[s] for s in sources.get(n, [])) / max(len(sources.get(n, [])), 1)
        row.sort(key=lambda n: mean[n])
        place.update({n: i - (len(row) - 1) / 2 for i, n in enumerate(row)})
    return rows


def _misfit(order: list[list[int]], fold: int) -> float:
    columns = [order[i : i + fold] for i in range(0, len(order), fold)]
    width = sum(max(map(len, column)) * SLOT + GUTTER for column in columns)
    return abs(width / (fold * ROW) - ASPECT)


# -- how it is drawn -------------------------------------------------------------------------------------
def _edge(a: Place, b: Place) -> str:
    right = a.x + WIDTH
    middle = a.y + HEIGHT / 2
    if a.gutter != b.gutter:
        return f"M{right:.0f} {middle:.0f}H{a.gutter:.0f}V{b.y - 8:.0f}H{b.x - 8:.0f}V{b.y + 9:.0f}H{b.x:.0f}"
    if b.y - a.y <= ROW:
        x = a.x + WIDTH / 2
        y = a.y + HEIGHT
        to = b.x + WIDTH / 2
        end = b.y
        bend = (end - y) / 2
        return f"M{x:.0f} {y:.0f}C{x:.0f} {y + bend:.0f} {to:.0f} {end - bend:.0f} {to:.0f} {end:.0f}"
    end = b.x + WIDTH
    level = b.y + HEIGHT / 2
    out = max(right, end) + 22
    return f"M{right:.0f} {middle:.0f}C{out:.0f} {middle:.0f} {out:.0f} {level:.0f} {end:.0f} {level:.0f}"


def _box(name: str, op: str, place: Place, layer: Layer | None, row: int | None) -> str:
    if len(name) <= LETTERS:
        short = name
    else:
        short = f"…{name[1 - LETTERS :]}"
    bits = layer.bits if layer is not None else ""
    tip = escape(" · ".join(_facts(name, op, layer)))
    text = (
        f'<g class="{" ".join(_classes(op, layer))}"><title>{tip}</title>'
        f'<rect x="{place.x:.0f}" y="{place.y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="4"/>'
        f'<text x="{place.x + 7:.0f}" y="{place.y + 14:.0f}">{escape(short)}'
        f'<tspan x="{place.x + 7:.0f}" dy="14">{escape(f"{op} {bits}".strip())}</tspan></text></g>'
    )
    if row is None:
        return text
    return f'<a href="#layer-{row}">{text}</a>'


def _facts(name: str, op: str, layer: Layer | None) -> Iterator[str]:
    yield f"{name} ({op})"
    if layer is not None:
        yield layer.bits or layer.state
        if layer.effect is not None:
            yield f"{decibel(layer.effect)} at the output"
        if layer.backend:
            yield layer.backend


def _classes(op: str, layer: Layer | None) -> Iterator[str]:
    """e0 ... e4 by the share of the noise, b2 ... b16 by the narrowest width."""
    yield "io" if op in ("input", "output") else "op"
    if layer is None:
        return
    if layer.noise is not None:
        yield f"e{sum(layer.noise >= border for border in NOISE)}"
    widths = [int(part[1:]) for part in layer.bits.split() if part[1:].isdigit()]
    if widths:
        yield f"b{next(b for b in (2, 4, 6, 8, 16) if min(widths) <= b or b == 16)}"
