"""A graph as mermaid text, which GitHub, GitLab and many editors draw.

Mermaid refuses more than 500 edges or 50,000 characters, and a diagram cannot raise these limits ("secure"
keys). A larger graph is drawn with less detail: first each chain becomes one box, then each module, from the
inside out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from torch import fx

from sparsebit.graph.ops import module_of

MAX_EDGES = 500
MAX_TEXT = 50_000
MAX_LINES = 12  # of one box; a longer box only counts its ops by kind
STYLES = ("classDef io fill:#cafe02", "classDef quantized fill:#d5f0e3,stroke:#2e8b57")
_ESCAPES = str.maketrans(
    {'"': "#quot;", "<": "#lt;", ">": "#gt;", "[": "#91;", "]": "#93;", "#": "#35;", "\n": " "}
)

Label = Callable[[fx.Node], str]
Box = list[fx.Node]


def to_mermaid(gm: fx.GraphModule, label: Label | None = None) -> str:
    """One box `name Type` per node, one arrow per edge, a frame around each top-level module.

    `label(node)` adds a text to the box, for example bits; boxes with such a text are coloured.
    """
    nodes = list(gm.graph.nodes)
    text = ""
    for boxes, lines in _coarser_and_coarser(nodes):
        text = _draw(gm, boxes, lines, label or (lambda node: ""))
        if len(text) < MAX_TEXT and text.count(" --> ") < MAX_EDGES:
            break
    return text


# -- what becomes a box -----------------------------------------------------------------------------
def _coarser_and_coarser(nodes: list[fx.Node]) -> Iterator[tuple[list[Box], int]]:
    """Boxes with less and less detail, and how many lines a box may have before it only counts."""
    yield [[node] for node in nodes], 1
    yield _chains(nodes), MAX_LINES
    for depth in range(max(len(_path(n)) for n in nodes), 0, -1):
        yield _modules(nodes, depth), 1


def _chains(nodes: list[fx.Node]) -> list[Box]:
    """A node joins the box of the node before it, if that is its only input and has no other reader."""
    box_of: dict[fx.Node, Box] = {}
    for node in nodes:
        source = None
        if len(node.all_input_nodes) == 1:
            source = node.all_input_nodes[0]
        joins = source is not None and len(source.users) == 1 and not _is_end(node) and not _is_end(source)
        if joins and source is not None and _frame(source) == _frame(node):
            box_of[node] = box_of[source]
            box_of[node].append(node)
        else:
            box_of[node] = [node]
    return list({id(box): box for box in box_of.values()}.values())


def _modules(nodes: list[fx.Node], depth: int) -> list[Box]:
    """Nodes of one module, `depth` levels down, are one box; inputs and outputs keep their boxes."""
    boxes: dict[object, Box] = {}
    for node in nodes:
        boxes.setdefault(node if _is_end(node) else _path(node)[:depth], []).append(node)
    return list(boxes.values())


def _is_end(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output")


def _path(node: fx.Node) -> tuple[str, ...]:
    """The modules around a node; its own name if there are none."""
    path = tuple(str(node.meta.get("path", node.name)).split("."))
    return path[:-1] or path


def _frame(node: fx.Node) -> str:
    """The top-level module around a node; "" for a node in the forward of the model itself."""
    path = str(node.meta.get("path", ""))
    if "." in path and not _is_end(node):
        return path.partition(".")[0]
    return ""


# -- how it is written ------------------------------------------------------------------------------
def _draw(gm: fx.GraphModule, boxes: list[Box], most: int, label: Label) -> str:
    ids = {node: f"n{i}" for i, box in enumerate(boxes) for node in box}
    lines = ["graph TD", *STYLES]
    frames: dict[str, list[str]] = {}
    for i, box in enumerate(boxes):
        text = _text(gm, box, most, label)
        frames.setdefault(_frame(box[0]), []).append(f'n{i}["{text}"]{_style(box, label)}')
    for i, (name, inside) in enumerate(frames.items()):
        framed = bool(name) and len(inside) > 1
        lines += [f'subgraph s{i}["{name.translate(_ESCAPES)}"]', *inside, "end"] if framed else inside
    edges = (f"{ids[a]} --> {ids[b]}" for b in ids for a in b.all_input_nodes if ids[a] != ids[b])
    return "\n".join([*lines, *dict.fromkeys(edges)]) + "\n"


def _style(box: Box, label: Label) -> str:
    if _is_end(box[0]):
        return ":::io"
    return ":::quantized" if any(map(label, box)) else ""


def _text(gm: fx.GraphModule, box: Box, most: int, label: Label) -> str:
    if len(box) <= most:
        return "<br/>".join(_line(gm, node, label) for node in box)
    prefix = ".".join(_common(_path(node) for node in box)) or box[0].name
    kinds = Counter(f"{_type(node, gm)} {label(node)}".strip() for node in box)
    shown = [f"{n} x {kind}" for kind, n in kinds.most_common(MAX_LINES - 2)]
    return "<br/>".join(part.translate(_ESCAPES) for part in (f"{prefix}, {len(box)} ops", *shown))


def _line(gm: fx.GraphModule, node: fx.Node, label: Label) -> str:
    return f"{node.name} {_type(node, gm)} {label(node)}".strip().translate(_ESCAPES)


def _common(paths: Iterable[tuple[str, ...]]) -> list[str]:
    same = []
    for parts in zip(*paths):
        if len(set(parts)) > 1:
            break
        same.append(parts[0])
    return same


def _type(node: fx.Node, gm: fx.GraphModule) -> str:
    if node.op == "call_module":
        return type(module_of(node, gm)).__name__
    if node.op == "output":
        return ""
    return node.op.removeprefix("call_")
