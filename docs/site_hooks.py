"""What mkdocs.yml needs beside plug-ins: files of the repository outside docs/, and docstrings as lists.

Links out of docs/ (README, changelog, examples) work on GitHub and in an editor. For the site, those files are added
below `repository/`, and links to and from them are turned around, so that `mkdocs build --strict` finds broken ones.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

try:
    from griffe import Extension
except ImportError:  # links need no griffe; the tests look at them without it
    Extension = object  # type: ignore[assignment,misc]

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OUTSIDE = ("*.md", "LICENSE", "examples/**/*")  # what pages may link to, from the root of the repository
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(?=[)#])")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
ALIGNED = re.compile(r"^(\*{0,2}[a-z_][\w, ]*?)(?:   *| {2,})(\S.*)$")


# -- links -------------------------------------------------------------------------------------------------
def outside_files() -> list[Path]:
    found = (path for pattern in OUTSIDE for path in ROOT.glob(pattern))
    return sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts)


def site_path(path: Path) -> PurePosixPath:
    """Where a file of the repository is on the site."""
    if path.is_relative_to(DOCS):
        return PurePosixPath(path.relative_to(DOCS).as_posix())
    return PurePosixPath("repository", path.relative_to(ROOT).as_posix())


def relink(markdown: str, source: Path) -> str:
    """Links of the file `source`, for the place that it has on the site."""

    def turn(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        if not target.is_file() or not target.is_relative_to(ROOT):
            return match[1]  # mkdocs will say that it is broken
        return os.path.relpath(site_path(target), site_path(source).parent)

    parts = FENCE.split(markdown)  # code is not touched
    return "".join(part if i % 2 else LINK.sub(turn, part) for i, part in enumerate(parts))


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path in outside_files():
        files.append(File.generated(config, str(site_path(path)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return relink(markdown, Path(page.file.abs_src_path))


def on_post_build(config: Any) -> None:
    """The pages as Markdown too: llms.txt links to them."""
    for path in DOCS.rglob("*.md"):
        shutil.copyfile(path, Path(config["site_dir"]) / path.relative_to(DOCS))


# -- docstrings --------------------------------------------------------------------------------------------
def as_markdown(text: str) -> str:
    """`name   what it is`, aligned over several lines, becomes a list; everything else stays."""
    out: list[str] = []
    in_list = False
    for line in text.splitlines():
        match = ALIGNED.match(line)
        if match:
            out += [] if in_list else [""]
            names = ", ".join(f"`{name.strip()}`" for name in match[1].split(","))
            out.append(f"- {names}: {match[2]}")
            in_list = True
        elif in_list and line.startswith("  "):
            out.append("  " + line.strip())
        else:
            out += ["", line] if in_list and line.strip() else [line]
            in_list = False
    return "\n".join(out)


class AlignedLists(Extension):
    """For mkdocstrings: lists of arguments as this project writes them."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
