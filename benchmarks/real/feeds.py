"""Batches on disk. Needs only numpy, so that every venv can read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Batch = dict[str, Array]  # arrays by the name of the input


def save_batches(file: Path, batches: list[Batch]) -> None:
    arrays = {f"{i:05d}/{name}": value for i, batch in enumerate(batches) for name, value in batch.items()}
    np.savez(file, **arrays)


def load_batches(file: Path) -> Iterator[Batch]:
    """One batch after the other; only one is in memory."""
    with np.load(file) as found:
        keys: dict[str, list[str]] = {}
        for key in found.files:
            keys.setdefault(key.split("/")[0], []).append(key)
        for group in keys.values():
            yield {key.split("/", 1)[1]: found[key] for key in group}


def batches_of(name: str, x: Array, size: int) -> list[Batch]:
    return [{name: np.ascontiguousarray(x[i : i + size])} for i in range(0, len(x), size)]


def save_outputs(file: Path, outputs: list[Array]) -> None:
    np.savez(file, *outputs)


def load_outputs(file: Path) -> list[Array]:
    with np.load(file) as found:
        return [found[key] for key in found.files]
