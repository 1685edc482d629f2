"""Histograms of the rounded values, 64 bars on a logarithmic scale of counts, because clipping concerns the tails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from sparsebit.report.facts import Histogram, Layer
from sparsebit.report.figures import share, span

SHOWN = 8  # layers that are unfolded
TALL = 40


def cards(layers: Sequence[Layer]) -> str:
    """The layers that hurt most first, or as they run; most of them folded."""
    ranked = sorted((x for x in layers if x.histograms), key=lambda x: -(x.noise or 0))
    if not ranked:
        return ""
    rest = _grid(ranked[SHOWN:])
    folded = f"<details><summary>{len(ranked) - SHOWN} more layers</summary>\n{rest}</details>"
    return (
        "<p>How often each value occurs, on a logarithmic scale: weights whole, activations of one batch. The band is "
        "the range that the codes hold; what lies beyond it is clipped.</p>\n"
        + _grid(ranked[:SHOWN])
        + (folded if rest else "")
    )


def _grid(layers: Sequence[Layer]) -> str:
    if not layers:
        return ""
    found = "\n".join(
        f"<figure><figcaption><b>{escape(x.name)}</b></figcaption>{''.join(map(_chart, x.histograms))}</figure>"
        for x in layers
    )
    return f'<div class="cards">\n{found}\n</div>'


def _chart(h: Histogram) -> str:
    low = min(h.low, h.range[0])
    high = max(h.high, h.range[1])
    scale = 1000 / ((high - low) or 1.0)
    x = lambda value: (value - low) * scale
    width = x(h.high) - x(h.low)
    step = width / len(h.counts)
    most = math.log1p(max(h.counts)) or 1.0
    tops = [TALL * (1 - math.log1p(n) / most) for n in h.counts]
    path = "".join(f"V{top:.3g}h{step:.1f}" for top in tops)
    kind = "activations"
    if h.label.startswith("W"):
        kind = "weights"
    clipped = ""
    if h.clipped:
        clipped = f", {share(h.clipped)} clipped"
    band = (
        f'<rect x="{x(h.range[0]):.0f}" y="0" width="{x(h.range[1]) - x(h.range[0]):.0f}" height="{TALL}"/>'
    )
    return (
        f'<svg class="bins" role="img" aria-label="{kind}" viewBox="0 0 1000 {TALL}" preserveAspectRatio="none">'
        f'{band}<path d="M{x(h.low):.1f} {TALL}{path}V{TALL}z"/></svg>'
        f"<p>{h.label} {kind} {span(h.low, h.high)}<br>codes hold {span(*h.range)}{clipped}</p>"
    )
