"""Commands that README and docs name in passing: the script is there and has the options, the target is known to make.

(Python blocks are run by test_docs.py, the lines of the command line by cli/test_command_page.py.)
"""

from __future__ import annotations

import re

import pytest

from test_docs import ALL_MARKDOWN, ROOT, name_of

SCRIPT = re.compile(r"python3? ((?:benchmarks|examples|tests)/[\w/-]+\.py)([^`\n#)]*)")
TARGET = re.compile(r"(?:^|`)make ([a-z]+)", re.MULTILINE)
SHARED = list((ROOT / "examples/helpers").glob("*.py"))
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("page", ALL_MARKDOWN, ids=name_of)
def test_scripts_and_targets_exist(page):
    text = page.read_text(encoding="utf-8")
    for script, arguments in SCRIPT.findall(text):
        assert (ROOT / script).is_file(), f"{script} does not exist"
        source = "".join(file.read_text(encoding="utf-8") for file in [ROOT / script, *SHARED])
        options = set(re.findall(r"--[a-z][\w-]*", arguments)) - {"--help"}
        missing = [option for option in options if f'"{option}"' not in source]
        assert not missing, f"{script} has no {missing}"
    assert set(TARGET.findall(text)) <= TARGETS


def test_the_patterns_find_something():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(SCRIPT.findall(readme)) > 4 and {"demo", "test", "bench"} <= set(TARGET.findall(readme))
