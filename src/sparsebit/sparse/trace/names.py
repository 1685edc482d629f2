"""Names of layers: paths (`layer1.0`), and names of torch.fx (`layer1_0`), which the original used."""

from __future__ import annotations

import re
from collections.abc import Iterable

WHOLE = "whole.root."  # prefix of the paths in a model that stays one node (graph/islands.py)


def inside_of_whole(path: str) -> str:
    """The path in the user's model."""
    return path.removeprefix(WHOLE)


def fx_name(path: str) -> str:
    """The name that torch.fx gives to the call of the module at `path`, if it is called once."""
    name = inside_of_whole(path).replace(".", "_")
    return f"_{name}" if name[:1].isdigit() else name


class Finder:
    """Finds a path by any of its spellings. The original also had wrapped layers: `bn1.module.weight`."""

    def __init__(self, paths: Iterable[str]):
        self.paths: dict[str, str] = {}
        for path in paths:
            self.paths.setdefault(_plain(path), path)

    def find(self, name: str) -> str | None:
        without_wrapper = re.sub(r"\.module(?=\.|$)", "", name)
        return self.paths.get(_plain(name), self.paths.get(_plain(without_wrapper)))


def _plain(path: str) -> str:
    parts = inside_of_whole(path).replace(".", "_")
    return re.sub("_+", "_", parts).strip("_")
