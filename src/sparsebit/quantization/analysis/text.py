"""Plain text for reports: aligned tables, sizes and counts a person can read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Columns as wide as their widest cell; those whose letter in `right` is "r" are aligned right."""
    lines = [list(header), *map(list, rows)]
    widths = []
    for i in range(len(header)):
        widths.append(max(len(line[i]) for line in lines))
    aligned = (
        [
            cell.rjust(width) if right[i : i + 1] == "r" else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ]
        for line in lines
    )
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def labels(rows: Iterable[Any]) -> dict[str, str]:
    """Rows have a `name` in the graph and a `path` in the model: name -> the path, with the name if it is not alone."""
    rows = list(rows)
    same = Counter(row.path for row in rows)
    found: dict[str, str] = {}
    for row in rows:
        if not row.path:
            found[row.name] = row.name
        elif same[row.path] == 1:
            found[row.name] = row.path
        else:
            found[row.name] = f"{row.path} ({row.name})"
    return found


def groups(reasons: Mapping[str, Sequence[str]], most: int = 6, names: int = 3) -> list[str]:
    """`12 ops: no integer kernel (a, b, c, ...)`: one line per reason, those with the most ops first."""
    ranked = sorted(reasons.items(), key=lambda item: -len(item[1]))
    lines = []
    for reason, found in ranked[:most]:
        shown = ", ".join(found[:names]) + (", ..." if len(found) > names else "")
        lines.append(f"{len(found)} {'op' if len(found) == 1 else 'ops'}: {reason} ({shown})")
    left = sum(len(found) for _, found in ranked[most:])
    return lines + ([f"{left} more, for {len(ranked) - most} other reasons"] if left else [])


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
