"""Two threads, fixed seeds, and the tiny models importable as `models` everywhere."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(2 if not hasattr(config, "workerinput") else 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that at the end no worker waits for one that has just begun."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for every reason to skip, with the number of tests; a file that is skipped whole counts as one."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[-1]).removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.section("skipped, and why")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5}  {reason.splitlines()[0]}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _logging_stays_on() -> Iterator[None]:
    """A script or test that silences the process would make later tests of warnings fail, in other files."""
    yield
    silenced = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    assert not silenced, "this test left logging disabled"
