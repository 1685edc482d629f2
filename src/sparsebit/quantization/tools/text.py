"""Plain text for reports: aligned tables, sizes and counts a person can read."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Columns as wide as their widest cell; those whose letter in `right` is "r" are aligned right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    aligned = (
        [
            cell.rjust(width) if right[i : i + 1] == "r" else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ]
        for line in lines
    )
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def size(n: float) -> str:
    """12345678 -> "12.3 MB"."""
    return f"{_scaled(n)}B"


def count(n: float) -> str:
    """1814073344 -> "1.81 G"."""
    return _scaled(n).rstrip()


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _scaled(n: float) -> str:
    for unit in ("", "k", "M", "G"):
        if abs(n) < 1000 or unit == "G":
            break
        n /= 1000
    return f"{n:.3g} {unit}" if abs(n) < 1000 else f"{n:.0f} {unit}"
