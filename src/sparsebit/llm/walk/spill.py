"""Activations on disk instead of in memory: a sequence of tensors, of which only the one in use is read."""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Spilled(Sequence[Tensor]):
    """Like a list of tensors; files of one folder, which its owner removes."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.length))]
        if not -self.length <= index < self.length:
            raise IndexError(index)
        return torch.load(self._path(index % self.length), weights_only=True)

    def __setitem__(self, index: int, value: Tensor) -> None:
        torch.save(value.contiguous(), self._path(index))

    def append(self, value: Tensor) -> None:
        self[self.length] = value
        self.length += 1

    def twin(self) -> Spilled:
        """A copy that can be written to."""
        other = Spilled(self.folder.parent)
        for tensor in self:
            other.append(tensor)
        return other

    def _path(self, index: int) -> Path:
        return self.folder / f"{index}.pt"


def copied(tensors: Any) -> Any:
    """Another list of the same activations."""
    if isinstance(tensors, Spilled):
        return tensors.twin()
    return list(tensors)


@contextlib.contextmanager
def spilling(where: str | Path | bool | None) -> Iterator[Path | None]:
    """A folder that is gone afterwards: in `where`, for True in the system's place for such; for None none."""
    if not where:
        yield None
        return
    if where is not True:
        Path(where).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sparsebit-", dir=None if where is True else where) as folder:
        yield Path(folder)


def give_back() -> None:
    """Freed memory to the system: glibc keeps it, in pieces that fit nothing, and the peak creeps up block by block."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
