"""How figures are written."""

from __future__ import annotations

from typing import Any

MUCH = 0.2  # cores of other programs that can be seen in times


def decibel(value: Any) -> str:
    if value is None:
        return ""
    number = float(value)
    if number == float("inf"):
        return "exact"
    return f"{number:.1f} dB"


def size(n: float) -> str:
    return f"{n:.0f} B" if n < 1000 else f"{count(n)}B"


def count(n: float) -> str:
    """12345678 -> 12.3 M."""
    for unit in ("", " k", " M"):
        if n < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g} G"


def share(part: float | None) -> str:
    """0.0123 -> 1.2 %; nothing for None."""
    if part is None:
        return ""
    return "none" if part == 0 else f"{100 * part:.2g} %"


def span(low: float, high: float) -> str:
    return f"{low:.3g} … {high:.3g}"


def busy(cores: float | None) -> str:
    """A remark for times: other programs used this many cores at the same time. Empty if they hardly did."""
    if cores is None or cores < MUCH:
        return ""
    return f"other programs took {cores:.1f} cores meanwhile, so both times may be too long"
