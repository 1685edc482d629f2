"""Names of layers: paths (`layer1.0`), and the names of torch.fx (`layer1_0`), under which the original kept them."""

from __future__ import annotations

import re
from collections.abc import Iterable

WHOLE = "whole.root."  # before the paths of a model that stays one node (graph/islands.py)


def inside_of_whole(path: str) -> str:
    """The path in the user's model."""
    return path.removeprefix(WHOLE)


def fx_name(path: str) -> str:
    """As torch.fx names the call of the module at `path`, if it calls it once."""
    name = inside_of_whole(path).replace(".", "_")
    return f"_{name}" if name[:1].isdigit() else name


class Finder:
    """Looks up a path by any of its spellings. The original also had wrapped layers: `bn1.module.weight`."""

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
