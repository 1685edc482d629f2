"""The docs are true: links lead somewhere, tables say what the code says (test_docs_code.py runs the code).

`PYTHONPATH=src python tests/test_docs.py` rewrites the generated tables of docs/config.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import docs_pages
from docs_pages import ALL_MARKDOWN, LINK, ROOT, name_of

CONFIG_PAGE = ROOT / "docs" / "config.md"
SCHEMA = ROOT / "docs" / "qconfig.schema.json"


@pytest.fixture
def own_registries() -> Iterator[None]:
    with docs_pages.own_registries():
        yield


# -- links -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", ALL_MARKDOWN, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [link.partition("#") for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]
    missing = [path for path, _, _ in targets if path and not (page.parent / path).exists()]
    assert not missing, f"{name_of(page)} links to {missing}"
    for path, _, anchor in targets:
        if anchor:
            assert anchor in anchors(page.parent / path if path else page), f"{name_of(page)}: #{anchor}"


def anchors(page: Path) -> set[str]:
    """How GitHub names the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_can_be_reached_from_the_readme():
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        links = (link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8")))
        todo += [(page.parent / p).resolve() for p in links if p.endswith(".md") and "://" not in p]
    assert not [name_of(page) for page in ALL_MARKDOWN if page not in seen]


# -- the front door ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", ["README.md", "README_zh-CN.md"])
def test_the_readme_is_short_and_in_order(page):
    """A reader decides in a minute: what it is, what it prints, what it gives, what others have, how to begin."""
    text = (ROOT / page).read_text(encoding="utf-8")
    places = [
        "[Apache-2.0](LICENSE)",
        "docs/pictures/pipeline.svg",
        "```python",
        "certificate      holds",
        "docs/pictures/report.png",
        "sparsebit quantize",
        "sparsebit llm quantize",
        "<!-- table: five models -->",
        "<!-- end table -->",
        "| Torch-Pruning |",
        "pip install sparsebit",
        "make demo",
        "make test",
        "docs/howto/prune-then-qat.md",
        "@software{sparsebit",
    ]
    assert [text.find(place) for place in places] == sorted(text.find(place) for place in places)
    assert text.find(places[0]) > 0 and text.count("\n") <= 150
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None and len([line for line in code[1].splitlines() if line]) == 8


def test_the_readme_claims_the_python_of_the_package():
    needed = re.search(
        r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert needed is not None
    for page in ("README.md", "README_zh-CN.md", "docs/get-started.md", "docs/zh/get-started.md"):
        assert f"Python {needed[1]}" in (ROOT / page).read_text(encoding="utf-8")


def test_the_migrate_page_lists_every_legacy_file():
    source = ROOT / "src" / "sparsebit"
    page = (ROOT / "docs/howto/migrate.md").read_text(encoding="utf-8")
    section = page.partition("## Legacy files")[2].partition("\n## ")[0]
    listed = set()
    for row in re.findall(r"^\| (`[^|]*\.py`) \|", section, re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", row)
        folder = first.rpartition("/")[0]
        listed |= {first, *(f"{folder}/{name}" for name in others)}
    legacy = set()
    for path in source.rglob("*.py"):
        if path.read_text(encoding="utf-8").startswith('"""Legacy:'):
            legacy.add(path.relative_to(source).as_posix())
    assert listed == legacy


# -- plug-ins and options ----------------------------------------------------------------------------------
@pytest.mark.parametrize("page", ["docs/concepts.md", "docs/zh/concepts.md"])
def test_every_plug_in_is_explained(page, own_registries):
    from sparsebit.quantization.observers import OBSERVERS_MAP
    from sparsebit.quantization.quantizers import QUANTIZERS_MAP, Mode

    text = (ROOT / page).read_text(encoding="utf-8")
    names = [*OBSERVERS_MAP, *QUANTIZERS_MAP, *(mode.name for mode in Mode)]
    assert not [name for name in names if f"| `{name}` |" not in text]


def test_every_sparser_is_explained(own_registries):
    from sparsebit.sparse.sparse_config import SparserConfig
    from sparsebit.sparse.sparsers import SPARSERS_MAP

    text = (ROOT / "docs/howto/prune.md").read_text(encoding="utf-8")
    assert not [name for name in SPARSERS_MAP if f"`{name}`" not in text]
    assert not [key for key in SparserConfig.model_fields if f"| `{key.upper()}` |" not in text]


@pytest.mark.parametrize("page", ["docs/concepts.md", "docs/zh/concepts.md"])
def test_the_passes_are_drawn_in_their_order(page):
    from sparsebit.quantization.pipeline import PIPELINE

    drawn = re.search(r"```text\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    names = [step.name for step in PIPELINE]
    assert drawn is not None
    assert [word for word in re.findall(r"\w+", drawn[1]) if word in names] == names


def test_config_tables_are_up_to_date(own_registries):
    text = CONFIG_PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run: PYTHONPATH=src python tests/test_docs.py"


# what options mean that say nothing themselves (Field(description=...) in quant_config.py wins)
MEANING = {
    "BACKEND": "who will run the model; decides which bits and schemes are allowed",
    "QSCHEME": "one scale per tensor or per channel; affine has a zero point, symmetric has none",
    "QUANTIZER.TYPE": "how values are rounded",
    "OBSERVER.TYPE": "how the value range is found",
}
DEFAULTS = {"DEVICE": "`cuda` if there is one, else `cpu`"}  # depends on the machine


def with_tables(text: str) -> str:
    """`text` with fresh tables between `<!-- table: name -->` and `<!-- end -->`."""
    for name, lines in (("options", option_rows()), ("backends", backend_rows()), ("presets", preset_rows())):
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        assert text.count(begin) == 1, f"docs/config.md must hold one {begin!r}"
        before, _, rest = text.partition(begin)
        text = before + begin + "\n".join([*lines, end]) + rest.partition(end)[2]
    return text


def option_rows() -> list[str]:
    """Every key of the YAML; keys that are the same for W and A share a row."""
    from sparsebit.quantization.quant_config import json_schema

    rows = dict(_walk(json_schema(), ""))
    lines = ["| key | default | legal values | meaning |", "|---|---|---|---|"]
    for path, (below, row) in rows.items():
        if path.startswith("A.") and rows.get(f"W.{below}") == (below, row):
            continue
        both = path.startswith("W.") and rows.get(f"A.{below}") == (below, row)
        key = f"`W.{below}`, `A.{below}`" if both else f"`{path}`"
        lines.append(f"| {key} | {row} |")
    return lines


def _walk(schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Key path -> (key path without W or A, default | legal values | meaning)."""
    for key, option in schema["properties"].items():
        path = f"{prefix}{key}"
        if "properties" in option:
            yield from _walk(option, f"{path}.")
            continue
        below = re.sub(r"^[WA]\.", "", path)
        default = DEFAULTS.get(path) or f"`{_yaml(option['default'])}`"
        meaning = option.get("description") or MEANING[below]
        yield path, (below, f"{default} | {_legal(below, option)} | {meaning}")


def _legal(key: str, option: dict[str, Any]) -> str:
    names = [name for choice in option.get("anyOf", ()) for name in choice.get("enum", ())]
    if names:
        return ", ".join(f"`{name}`" for name in names)
    if key == "SPECIFIC":
        return "see [SPECIFIC](#specific)"
    kind = {
        "boolean": "`true`, `false`",
        "integer": "integer",
        "number": "number",
        "string": "text",
        "array": "list",
    }
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    empty = ""
    if "type" not in option:  # an option that may be null
        option, empty = option["anyOf"][0], ", or `null`"
    limits = [f"{sign} {option[name]:g}" for name, sign in signs.items() if name in option]
    return " ".join([kind[option["type"]], ", ".join(limits)]).strip() + empty


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def backend_rows() -> list[str]:
    from sparsebit.export.backends import BACKENDS
    from sparsebit.quantization.quant_config import BUILT_IN, _either

    lines = ["| BACKEND | W bits | A bits | W schemes | A schemes |", "|---|---|---|---|---|"]
    for name in BUILT_IN:
        limits = [BACKENDS[name].BITS, BACKENDS[name].SCHEMES]
        cells = [_either(limit[letter]) if letter in limit else "any" for limit in limits for letter in "WA"]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def preset_rows() -> list[str]:
    from sparsebit.quantization.presets import presets

    return [
        "| preset | what it is for |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in presets().items()),
    ]


def schema_text() -> str:
    from sparsebit.quantization.quant_config import json_schema

    return json.dumps(json_schema(), indent=1, sort_keys=True) + "\n"


def test_published_schema_is_up_to_date(own_registries: None) -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), (
        "run: PYTHONPATH=src python tests/test_docs.py"
    )


if __name__ == "__main__":
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    CONFIG_PAGE.write_text(with_tables(CONFIG_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
