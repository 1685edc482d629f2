"""Will it take my model? Models of torchvision, timm and transformers as they are, random weights, W8A8.

Each must build, keep its float output, calibrate, quantize, and have at least 95 % of its MACs quantized.
`python tests/zoo/make_table.py` writes the same figures into docs/zoo.md.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import zoo_timm
import zoo_torchvision
import zoo_transformers
from zoo_run import LEAST_SHARE, SAMPLE, Case, params, run

LISTS = {"torchvision": zoo_torchvision.CASES, "timm": zoo_timm.CASES, "transformers": zoo_transformers.CASES}
ALL = [case for cases in LISTS.values() for case in cases]


@pytest.mark.parametrize("package, least", [("torchvision", 60), ("timm", 60), ("transformers", 25)])
def test_the_zoo_is_large_enough(package: str, least: int) -> None:
    names = [case.name for case in LISTS[package]]
    assert len(names) == len(set(names)) >= least


def test_the_sample_is_part_of_the_zoo() -> None:
    names = {f"{case.package}-{case.name}" for case in ALL}
    assert set(SAMPLE) <= names and {name.split("-")[0] for name in SAMPLE} == set(LISTS)


@pytest.mark.parametrize("case", params(ALL))
@pytest.mark.filterwarnings("ignore")  # of the packages themselves
def test_zoo(case: Case) -> None:
    if find_spec(case.package) is None:
        pytest.skip(f"{case.package} is not installed")
    row = run(case)
    assert row.error <= 1e-4, f"float output differs by {row.error:.2g} of its largest value"
    assert row.finite
    assert row.share >= LEAST_SHARE, f"{row.share:.1%} of the MACs are quantized; islands: {row.islands}"
    # untrained nets amplify any noise: only a large loss means something
    if row.db is not None and row.plain_db is not None:
        assert row.db >= row.plain_db - 10, f"{row.db:.1f} dB, where plain W8A8 has {row.plain_db:.1f}"
