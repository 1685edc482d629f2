"""Two threads, fixed seeds, and the tiny models importable as `models` everywhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(2 if not hasattr(config, "workerinput") else 1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
