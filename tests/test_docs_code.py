"""Every block of the pages is what its fence says, and the python blocks run."""

from __future__ import annotations

import ast
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from docs_pages import ALL_MARKDOWN, FENCE, PAGES, ROOT, START, TRANSLATED, blocks_of, name_of, own_registries

KINDS = {
    "python",
    "bash",
    "console",
    "text",
}  # bash: test_named_commands.py; console: cli/test_command_page.py


def shown_output(page: Path) -> list[str]:
    """The lines of text blocks behind python blocks, without those that the page shortens."""
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    output = [
        after for (kind, _), (next_kind, after) in pairwise(fences) if (kind, next_kind) == ("python", "text")
    ]
    return [line for line in "".join(output).splitlines() if "..." not in line]


def without_figures(line: str) -> str:
    """Figures depend on the machine and on random weights; the words do not."""
    return " ".join(re.sub(r"[-+]?\d[\d.]*(e-?\d+)?", "#", line).split())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    scope = ModuleType("page_" + re.sub(r"\W", "_", name_of(page)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, scope.__name__, scope)  # classes of the page know where they live
    monkeypatch.setattr(sys, "path", list(sys.path))
    blocks = blocks_of(page)
    left = {block.line: block.missing for block in blocks if block.missing}
    if name_of(page) in START and len(left) < len([block for block in blocks if block.needs]):
        vars(scope).update(START[name_of(page)](tmp_path))
    with own_registries():
        for block in blocks:
            if not block.missing:  # the blank lines make tracebacks point into the page
                exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), vars(scope))
    printed = {without_figures(line) for line in capsys.readouterr().out.splitlines()}
    missing = [line for line in shown_output(page) if without_figures(line) not in printed]
    assert left or not missing, f"{name_of(page)} shows output that no block prints: {missing}"
    if left:
        lost = sorted({name for names in left.values() for name in names})
        lines = ", ".join(map(str, left))
        pytest.skip(f"the blocks at lines {lines} need {', '.join(lost)}, not installed here; the others ran")


def test_pages_leave_the_registries_alone():
    from sparsebit.quantization.observers import OBSERVERS_MAP
    from sparsebit.quantization.quantizers import QUANTIZERS_MAP

    homes = {cls.__module__ for cls in [*OBSERVERS_MAP.values(), *QUANTIZERS_MAP.values()]}
    assert not [home for home in homes if home.startswith("page_")]


def test_there_is_something_to_run_and_only_language_models_need_more():
    blocks = {name_of(page): blocks_of(page) for page in PAGES}
    assert all(blocks[name] for name in blocks if name.startswith("docs/howto/")) and blocks["README.md"]
    assert {name for name, found in blocks.items() if any(b.needs for b in found)} == set(START)
    assert {name for found in blocks.values() for b in found for name in b.needs} == {
        "transformers",
        "peft",
        "gguf",
    }


@pytest.mark.parametrize("page", ALL_MARKDOWN, ids=name_of)
def test_no_code_hides_behind_another_fence(page):
    text = page.read_text(encoding="utf-8")
    fences = FENCE.findall(text)
    assert 2 * len(fences) == len(
        re.findall(r"^\s*```", text, re.MULTILINE)
    )  # each begins and ends at the margin
    assert {kind for kind, _ in fences} <= KINDS
    for kind, shown in fences:
        if kind == "text":  # output
            with pytest.raises(SyntaxError):
                ast.parse(shown)
            assert not re.search(r"^(\$|make|pip|python|torchrun|sparsebit) ", shown, re.MULTILINE)


def test_blocks_are_found_with_their_needs(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\n\n<!-- needs: peft, gguf -->\n```python\nb = 1\n```\n```text\nno\n```\n"
    )
    found = [(block.line, block.code, block.needs) for block in blocks_of(page)]
    assert found == [(2, "a = 1\n", ()), (7, "b = 1\n", ("peft", "gguf"))]


@pytest.mark.parametrize("page", TRANSLATED, ids=name_of)
def test_translations_show_the_same_code(page):
    """Comments may be translated; what runs, and what it prints, is the same."""
    ours, theirs = blocks_of(page), blocks_of(TRANSLATED[page])
    assert [ast.dump(ast.parse(b.code)) for b in ours] == [ast.dump(ast.parse(b.code)) for b in theirs]
    commands = [[b.code for b in blocks_of(p, "bash")] for p in (page, TRANSLATED[page])]
    mine, original = ([re.sub(r" *#.*", "", code) for code in found] for found in commands)
    assert mine == original
    lines = [[b.code for b in blocks_of(p, "console")] for p in (page, TRANSLATED[page])]
    assert lines[0] == lines[1]
    assert shown_output(page) == shown_output(TRANSLATED[page])


def test_shown_output_is_compared_without_its_figures():
    assert without_figures("  noise floor  -55.3 dB, 1.7e-05 of 40") == "noise floor # dB, # of #"
    assert len(shown_output(ROOT / "README.md")) > 5
