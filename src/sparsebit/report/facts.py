"""Facts of a run: what a report shows, whatever its format. `from_folder.py` reads them from the folder of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

HURT_MOST = 3


@dataclass
class Histogram:
    """The values that one quantizer rounds: counts of equal bins between `low` and `high`, and the range of its
    codes."""

    label: str  # W8
    low: float
    high: float
    counts: list[int]
    range: tuple[float, float]
    clipped: float | None  # the share of values beyond the range


@dataclass
class Layer:
    """One op of a quantized model."""

    name: str
    path: str
    op: str
    state: str
    how: str
    bits: str = ""  # W8 A8
    scheme: str = ""
    range: str = ""
    clipped: str = ""
    own: float | None = None  # SQNR of the layer's output in dB, when only this layer is quantized
    effect: float | None = None  # SQNR of the model's output, when only this layer is quantized
    noise: float | None = None  # its share of the noise of all layers
    bytes: int = 0
    quantized_bytes: int = 0
    macs: int = 0
    integer: bool = False
    backend: str = ""  # "integers", or why not
    fix: str = ""
    fixed: float | None = None  # `own` with the fix
    suggested: bool = False  # the fix helps the whole model, beside the others that are suggested
    histograms: list[Histogram] = field(default_factory=list)


@dataclass
class Graph:
    """Nodes (name, op) in the order they run, edges as pairs of places in that list, and the same as mermaid text."""

    nodes: list[tuple[str, str]]
    edges: list[tuple[int, int]]
    mermaid: str = ""


@dataclass
class Facts:
    title: str
    command: str
    version: str
    headline: list[tuple[str, str, str]] = field(default_factory=list)  # label, value, remark
    metric: dict[str, Any] | None = None  # name, float, new, samples
    latency: dict[str, Any] | None = None  # milliseconds of float and new, batch, cores, machine
    layers: list[Layer] = field(default_factory=list)
    graph: Graph | None = None
    pruned: list[tuple[str, int, int]] = field(default_factory=list)  # layer, channels before, after
    certificate: list[str] = field(default_factory=list)
    failure: str = ""  # of a file that was refused: where it starts to differ
    warning: str = ""  # about the result as a whole, with what to do
    alarming: tuple[str, ...] = ()  # labels of the headline that are shown in red
    todo: list[str] = field(default_factory=list)  # commands that would add something
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def hurt_most(self) -> list[Layer]:
        """The layers that cost most and have a fix; their fixes were tried together."""
        ranked = sorted((x for x in self.layers if x.suggested and x.fix), key=lambda x: x.effect or 0)
        return ranked[:HURT_MOST]
