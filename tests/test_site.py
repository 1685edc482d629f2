"""The site: menu, links, pictures and API page fit the files; with mkdocs, a strict build."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import posixpath
import pydoc
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from test_docs import ALL_MARKDOWN, LINK, ROOT, name_of, option_rows


def menu(entries: Any) -> Iterator[str]:
    """The pages of a nav of mkdocs."""
    for entry in entries:
        page = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from menu(page) if isinstance(page, list) else [page]


def test_the_menu_has_every_page_and_no_other(site_hooks):
    nav = list(menu(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    known = pages | {str(site_hooks.site_path(path)) for path in site_hooks.outside_files()}
    assert sorted(pages - set(nav)) == [] and sorted(set(nav) - known) == []
    assert len(nav) == len(set(nav))


@pytest.fixture(scope="module")
def site_hooks():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs/site_hooks.py")))


@pytest.mark.parametrize("page", ALL_MARKDOWN, ids=name_of)
def test_links_of_the_site_lead_somewhere(page, site_hooks):
    """Files outside docs/ are below repository/ there, and links to and from them are turned around."""
    there = {
        str(site_hooks.site_path(path)) for path in [*(ROOT / "docs").rglob("*"), *site_hooks.outside_files()]
    }
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    home = PurePosixPath(site_hooks.site_path(page)).parent
    links = [link.partition("#")[0] for link in LINK.findall(site_hooks.relink(text, page))]
    targets = [
        posixpath.normpath(str(home / link)) for link in links if link and not re.match(r"[a-z]+:", link)
    ]
    assert not [target for target in targets if target not in there]


def test_relink_leaves_code_and_broken_links_alone(site_hooks):
    text = (
        "[a](../CHANGELOG.md#x) [b](missing.md) [c](https://x.org/README.md)\n```\n[d](../README.md)\n```\n"
    )
    assert site_hooks.relink(text, ROOT / "docs/index.md") == text.replace(
        "(../CHANGELOG.md#x)", "(repository/CHANGELOG.md#x)"
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; broken links are errors."""
    beside = Path(sys.executable).with_name("mkdocs")
    command = str(beside) if beside.exists() else shutil.which("mkdocs")
    if command is None:
        pytest.skip("mkdocs is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("built") / "site"
    run = subprocess.run(
        # not --quiet: it does not count warnings
        [command, "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def test_the_site_builds_strictly(site):
    page = (site / "api/index.html").read_text(encoding="utf-8")
    assert "A calibrated, quantizing copy of" in page  # a docstring
    assert "fonts.googleapis" not in page  # nothing comes from elsewhere


# -- finding things ----------------------------------------------------------------------------------------
def ranking(index: dict[str, Any], query: str) -> list[str]:
    """Pages in the order of a search: a word in a title counts as often as the site says, in a text once.

    The site's own search (lunr) weighs rare words and long texts too. The title decides there as well.
    """
    boosts = {name: field["boost"] for name, field in index["config"]["fields"].items()}
    best: dict[str, float] = {}
    for entry in index["docs"]:
        words = {name: re.findall(r"\w+", str(entry.get(name, "")).lower()) for name in boosts}
        scores = [
            sum(boosts[name] * found.count(term) / len(found) for name, found in words.items() if found)
            for term in query.lower().split()
        ]
        page = entry["location"].partition("#")[0]
        if all(scores):
            best[page] = max(best.get(page, 0.0), sum(scores) * entry.get("boost", 1))
    return sorted(best, key=lambda page: -best[page])


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("ONNX", "howto/export/"),
        ("slow", "howto/make-int8-fast/"),
        ("slow", "howto/troubleshooting/"),
        ("accuracy drop", "howto/debug-an-accuracy-drop/"),
        ("language model", "howto/llm/"),
        ("剪枝", "zh/prune/"),
    ],
)
def test_a_search_leads_to_the_page_that_helps(query, page, site):
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    assert page in ranking(index, query)[:2]


def test_llms_txt_lists_every_page(site):
    text = (ROOT / "docs/llms.txt").read_text(encoding="utf-8")
    entries = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S.*$", text, flags=re.MULTILINE)
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(entries) == sorted(pages) and len(entries) == text.count("\n- ")
    assert (site / "llms.txt").is_file() and [page for page in pages if not (site / page).is_file()] == []


def api_names() -> list[str]:
    return re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)


def located(name: str) -> object:
    """The object of that name; a function may have the name of the module that it is in."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        return pydoc.locate(name)


@pytest.mark.parametrize("name", api_names())
def test_what_the_api_page_shows_is_there(name):
    assert inspect.getdoc(located(name))  # its own, or that of its base class


def test_the_api_page_has_all_public_names():
    import sparsebit

    shown = {id(located(name)) for name in api_names()}
    public = {name: getattr(sparsebit, name) for name in sparsebit.__all__ if not name.startswith("_")}
    public |= {f"llm.{name}": getattr(public["llm"], name) for name in ("quantize", "load", "perplexity")}
    del public["llm"]
    assert [name for name, value in public.items() if id(value) not in shown] == []


def test_aligned_docstrings_become_lists(site_hooks):
    text = "Does it.\n\nmodel    a module,\n         or two\nx, y     numbers\nThat is all.  Really."
    want = "Does it.\n\n\n- `model`: a module,\n  or two\n- `x`, `y`: numbers\n\nThat is all.  Really."
    assert site_hooks.as_markdown(text) == want


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").rglob("*.svg")), ids=name_of)
def test_pictures_are_used_and_say_what_they_show(picture):
    from xml.etree import ElementTree

    title = ElementTree.parse(picture).getroot().find("{http://www.w3.org/2000/svg}title")
    assert title is not None and title.text
    shown = [
        text
        for page in ALL_MARKDOWN
        for text in re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", page.read_text("utf-8"))
    ]
    alternatives = [words for words, link in shown if link.endswith(picture.name)]
    assert alternatives and all(alternatives)


def test_every_example_is_listed():
    text = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    scripts = [*(ROOT / "examples").rglob("main.*"), *(ROOT / "examples").glob("*.py")]
    names = [name_of(path) for path in scripts if path.suffix in (".py", ".ipynb")]
    assert [name for name in names if f"(../{name})" not in text] == []


@pytest.mark.parametrize("page", ["migrate", "troubleshooting"])
def test_names_in_the_tables_are_real(page):
    """`qmodel.x`, `smodel.x`, `sparsebit.x`, and keys of the config, wherever the prose has them."""
    import torch
    from torch import nn

    import sparsebit

    net, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)), torch.randn(1, 3, 4, 4)
    things = {
        "qmodel": sparsebit.quantize(net.eval(), [x]),
        "smodel": sparsebit.SparseModel(net),
        "small": sparsebit.prune(net, x),
        "sparsebit": sparsebit,
    }
    text = re.sub(
        r"```.*?```", "", (ROOT / f"docs/howto/{page}.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    named = re.findall(r"`[^`]*?\b(qmodel|smodel|small|sparsebit)\.(\w+)", text)
    assert len(named) > 2 and [f"{a}.{b}" for a, b in named if not hasattr(things[a], b)] == []
    keys = re.findall(r"`((?:[WA]|SCHEDULE)\.[A-Z_.]+)", text)
    options = "\n".join(option_rows())
    assert keys and [key for key in keys if f"`{key}" not in options] == []
