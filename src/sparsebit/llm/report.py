"""What `llm.quantize` did, readable: bits and error of every layer, size, what stayed float."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebit.llm.blocks import Layout


@dataclass(frozen=True)
class Report:
    folder: Path
    layout: Layout
    method: str
    layers: dict[str, dict[str, Any]] = field(
        repr=False
    )  # bits, stored_bits, error (share of the output), note
    sizes: dict[str, int] = field(repr=False)
    seconds: float = 0.0

    @property
    def average_bits(self) -> float:
        """Of the codes."""
        return self._mean("bits")

    @property
    def stored_bits(self) -> float:
        """With scales and zeros."""
        return self._mean("stored_bits")

    def worst(self, n: int = 5) -> list[str]:
        """The layers whose output changed most."""
        known = [name for name, about in self.layers.items() if "error" in about]
        return sorted(known, key=lambda name: -self.layers[name]["error"])[:n]

    def _mean(self, key: str) -> float:
        return sum(self.sizes[n] * a[key] for n, a in self.layers.items()) / sum(self.sizes.values())

    def __str__(self) -> str:
        lines = [
            f"{self.method}: {len(self.layers)} layers at {self.average_bits:.2f} bits "
            f"({self.stored_bits:.2f} with scales) in {self.folder}, {self.seconds:.0f} s",
            str(self.layout),
        ]
        for name in self.worst():
            about = self.layers[name]
            lines.append(f"  {about['error']:.2%} of the output changed at {about['bits']} bits: {name}")
        lines += [f"  {name}: {a['note']}" for name, a in self.layers.items() if "note" in a]
        return "\n".join(lines)
