"""The zoo as ONNX files: every file is certified in a plain session, and pre-flight announced its integer kernels.

Models are torchvision's, timm's and transformers', with random weights. Pre-flight cannot follow a part that torch.fx
cannot trace, so models with islands are only exported. Of models with functions that are wrapped as one op (windowed
attention) only the integer kernels are counted: the float ones inside are not seen. `run_export.py` runs all of them
with a row for each, and goes on where it was stopped.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import zoo_timm
import zoo_torchvision
import zoo_transformers
from zoo_export import export
from zoo_run import Case, params

CASES = [*zoo_torchvision.CASES, *zoo_timm.CASES, *zoo_transformers.CASES]


@pytest.mark.parametrize("case", params(CASES))
@pytest.mark.filterwarnings("ignore")  # of the packages themselves
def test_the_file_is_right_and_as_announced(case: Case, tmp_path: Path) -> None:
    if find_spec(case.package) is None:
        pytest.skip(f"{case.package} is not installed")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    outcome = export(case, tmp_path)
    assert outcome.ok
    shown = f"announced, in the file: {outcome.differences}\n{outcome.report.why_float}"
    assert not outcome.differences, shown
