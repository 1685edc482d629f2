"""What `llm.quantize` did, readable: bits and error of every layer, size, what stayed float."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebit.llm.checks.quality import Quality, advice
from sparsebit.llm.models.blocks import Layout
from sparsebit.llm.readers import Row

# shares of the weights in the blocks that stay float
SHOWN = 0.01  # the report shows it
MUCH = 0.1  # the report warns


def share_of(left: Mapping[str, int], quantized: int) -> float:
    """The share of the weights in the blocks that stays float."""
    return sum(left.values()) / max(quantized + sum(left.values()), 1)


def left_text(share: float, left: Mapping[str, int]) -> str:
    return f"{share:.0%} of the weights in the blocks stay float, such as {next(iter(left))}"


@dataclass(frozen=True)
class Report:
    folder: Path
    layout: Layout
    method: str
    # bits, stored_bits, error (share of the output), note
    layers: dict[str, dict[str, Any]] = field(repr=False)
    sizes: dict[str, int] = field(repr=False)
    seconds: float = 0.0
    readers: tuple[Row, ...] = ()  # who runs it
    # matrices in the blocks that stay float: weights
    left: dict[str, int] = field(default_factory=dict, repr=False)
    measured: Quality | None = (
        None  # of the whole model; None without data, or where it gives no scores of tokens
    )
    run: dict[str, Any] = field(default_factory=dict, repr=False)  # the settings of the user

    @property
    def average_bits(self) -> float:
        """The mean number of bits of the codes."""
        return self._mean("bits")

    @property
    def stored_bits(self) -> float:
        """The mean number of stored bits per weight, with scales and zeros."""
        return self._mean("stored_bits")

    @property
    def sparsity(self) -> float | None:
        """The share of zeros that pruning made; None where weights were quantized."""
        if any("sparsity" in a for a in self.layers.values()):
            return self._mean("sparsity")
        return None

    @property
    def left_share(self) -> float:
        """The share of the weights in the blocks that stays float."""
        return share_of(self.left, sum(self.sizes.values()))

    @property
    def warning(self) -> str:
        """A collapse of the whole model, and what to do; empty where there is none."""
        if self.measured is None or not self.measured.collapsed:
            return ""
        return f"the model has collapsed: {self.measured}; {advice(self.run)}"

    def worst(self, n: int = 5) -> list[str]:
        """The layers whose output changed most."""
        known = [name for name, about in self.layers.items() if "error" in about]
        return sorted(known, key=lambda name: -self.layers[name]["error"])[:n]

    def _mean(self, key: str) -> float:
        return sum(self.sizes[n] * a[key] for n, a in self.layers.items()) / max(sum(self.sizes.values()), 1)

    def __str__(self) -> str:
        how = f"at {self.average_bits:.2f} bits ({self.stored_bits:.2f} with scales)"
        if self.sparsity is not None:
            how = f"with {self.sparsity:.1%} zeros"
        lines = [
            f"{self.method}: {len(self.layers)} layers {how} in {self.folder}, {self.seconds:.0f} s",
            str(self.layout),
        ]
        for name in self.worst():
            about = self.layers[name]
            kind = "by zeros"
            if self.sparsity is None:
                kind = f"at {about['bits']} bits"
            lines.append(f"  {about['error']:.2%} of the output changed {kind}: {name}")
        lines += [f"  {name}: {a['note']}" for name, a in self.layers.items() if "note" in a]
        if self.left_share > SHOWN:
            lines.append(f"  {left_text(self.left_share, self.left)}")
        lines += [str(row) for row in self.readers]
        lines.append(
            str(self.measured or "perplexity was not measured: no calibration tokens to measure it on")
        )
        return "\n".join(lines)
