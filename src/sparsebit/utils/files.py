"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file; an interrupted write leaves the old file."""
    with whole_file(path) as file:
        file.write(data)


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """The file to write to; it gets the name `path` when the block ends without an error."""
    with whole_path(path) as temporary, temporary.open("wb") as file:
        yield file


@contextmanager
def whole_path(path: str | Path) -> Iterator[Path]:
    """An empty file beside `path`, for writers that open files by name; it gets the name `path` when the block ends."""
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    try:
        yield Path(name)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes files that only their owner can read
        os.replace(name, path)
    except BaseException:  # also on Ctrl-C
        Path(name).unlink(missing_ok=True)
        raise
