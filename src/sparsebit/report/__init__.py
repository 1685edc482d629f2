"""Reports of runs: from_folder.py reads the folder of a run, one file per format writes the report.

Needs neither torch nor a network.
"""

from __future__ import annotations

from pathlib import Path

from sparsebit.errors import SparsebitError
from sparsebit.registry import Registry
from sparsebit.report.facts import Facts
from sparsebit.report.formats import FORMATS
from sparsebit.report.from_folder import read_facts

__all__ = ["FORMATS", "Facts", "read_facts", "render"]

Registry[object]("report format").discover(f"{__name__}.formats")


def render(folder: str | Path, style: str = "html") -> str:
    """The report of the run in `folder` as one text: html, md or json."""
    if style not in FORMATS:
        raise SparsebitError(f"{style}: no such format of a report{FORMATS.hint(style)}")
    return FORMATS[style](read_facts(Path(folder)))
