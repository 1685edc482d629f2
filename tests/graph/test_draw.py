"""Mermaid text."""

from __future__ import annotations

import re

import torch
from torch import fx, nn

from sparsebit.graph import to_mermaid


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x, end):
        return torch.cat([self.fc(x), end])


def test_lines():
    assert to_mermaid(fx.symbolic_trace(Net())).splitlines() == [
        "graph TD",
        'x["x(x), placeholder"]',
        "style x fill:#cafe02",
        'end_["end(end), placeholder"]',
        "style end_ fill:#cafe02",
        'fc["fc(fc), Linear"]',
        "x --> fc",
        'cat["cat(cat), call_function"]',
        "fc --> cat",
        "end_ --> cat",
        'output["output(output), output"]',
        "style output fill:#cafe02",
        "cat --> output",
    ]


def test_labels_cannot_break_the_syntax():
    text = to_mermaid(
        fx.symbolic_trace(Net()), label=lambda n: 'W8 ["a" <b>] #1\nA8' if n.name == "fc" else ""
    )
    (line,) = [x for x in text.splitlines() if x.startswith("fc[")]
    inside = re.fullmatch(r'fc\["(.*)"\]', line).group(1)
    assert inside == "fc(fc), Linear<br/>W8 #91;#quot;a#quot; #lt;b#gt;#93; #35;1 A8"
