"""Mermaid text: boxes, frames and arrows, a syntax that labels cannot break, and the limits of mermaid."""

from __future__ import annotations

import re

import pytest
import torch
from torch import fx, nn

from sparsebit.graph import to_mermaid
from sparsebit.graph.draw import MAX_EDGES, MAX_TEXT

BOX = re.compile(r'(n\d+)\["([^"\[\]]*)"\](:::io|:::quantized)?')
EDGE = re.compile(r"(n\d+) --> (n\d+)")
OTHER = re.compile(r'graph TD|classDef \w+ [\w:#,]+|subgraph s\d+\["[^"\[\]]*"\]|end')


def parsed(text):
    """({id: label}, {(from, to)}); every line must be something mermaid knows."""
    boxes, edges, open_frames = {}, [], 0
    for line in text.splitlines():
        if match := BOX.fullmatch(line):
            assert match[1] not in boxes
            boxes[match[1]] = match[2]
        elif match := EDGE.fullmatch(line):
            edges.append((match[1], match[2]))
        else:
            assert OTHER.fullmatch(line), line
            open_frames += {"subgraph": 1, "end": -1}.get(line.split()[0], 0)
            assert open_frames in (0, 1)
    assert open_frames == 0 and len(set(edges)) == len(edges)
    assert all(end in boxes for edge in edges for end in edge)
    return boxes, set(edges)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x, end):
        return torch.cat([self.fc(x), end])


def test_lines():
    assert to_mermaid(fx.symbolic_trace(Net())).splitlines()[3:] == [
        'n0["x placeholder"]:::io',
        'n1["end placeholder"]:::io',
        'n2["fc Linear"]',
        'n3["cat function"]',
        'n4["output"]:::io',
        "n0 --> n2",
        "n2 --> n3",
        "n1 --> n3",
        "n3 --> n4",
    ]


def test_labels_cannot_break_the_syntax():
    text = to_mermaid(
        fx.symbolic_trace(Net()), label=lambda n: 'W8 ["a" <b>] #1\nA8' if n.name == "fc" else ""
    )
    boxes, _ = parsed(text)
    assert boxes["n2"] == "fc Linear W8 #91;#quot;a#quot; #lt;b#gt;#93; #35;1 A8"
    assert ":::quantized" in next(line for line in text.splitlines() if line.startswith("n2["))


class Block(nn.Module):
    def __init__(self, ops):
        super().__init__()
        self.ops = nn.Sequential(*[nn.Linear(2, 2) for _ in range(ops)])

    def forward(self, x):
        return x + self.ops(x)


class Deep(nn.Module):
    """stages.i.j are blocks of `ops` layers and an addition."""

    def __init__(self, stages, blocks, ops):
        super().__init__()
        stage = lambda: nn.Sequential(*[Block(ops) for _ in range(blocks)])
        self.stages = nn.ModuleList(stage() for _ in range(stages))
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


def traced(*sizes):
    gm = fx.symbolic_trace(Deep(*sizes))
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        inside = list(stack.values())[-1][0] if stack else ""
        node.meta["path"] = node.target if node.op == "call_module" else f"{inside}.add".lstrip(".")
    return gm


def test_a_frame_around_each_top_level_module():
    text = to_mermaid(traced(2, 2, 2))
    boxes, edges = parsed(text)
    assert len(boxes) == 15 and len(edges) == 18
    frame = text[text.index("subgraph") : text.index("\nend")]
    assert '"stages"' in frame and "stages_0_0_ops_0 Linear" in frame
    assert "head" not in frame and "placeholder" not in frame


@pytest.mark.parametrize(
    ("sizes", "nodes", "boxes_at_least"),
    [((4, 25, 4), 503, 200), ((4, 40, 12), 2083, 160), ((8, 60, 3), 1923, 480), ((6, 100, 4), 3003, 9)],
)
def test_large_graphs_stay_within_the_limits_of_mermaid(sizes, nodes, boxes_at_least):
    gm = traced(*sizes)
    assert len(gm.graph.nodes) == nodes
    text = to_mermaid(gm, label=lambda n: "W8 A8" if n.op == "call_module" else "")
    boxes, edges = parsed(text)
    assert len(text) < MAX_TEXT and len(edges) < MAX_EDGES
    assert len(boxes) >= boxes_at_least and "W8 A8" in text
    reached, todo = set(), ["n0"]  # the picture is in one piece
    while todo:
        box = todo.pop()
        if box not in reached:
            reached.add(box)
            todo += [b for a, b in edges if a == box]
    assert reached == set(boxes)


def test_500_nodes_are_all_named():
    gm = traced(4, 25, 4)
    boxes, _ = parsed(to_mermaid(gm))
    words = {word for text in boxes.values() for word in re.split(r"<br/>| ", text)}
    assert {node.name for node in gm.graph.nodes} <= words
