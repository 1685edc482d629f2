"""What pre-flight announces as integer is integer in onnxruntime: models of torchvision and timm, exported.

A part that torch.fx cannot trace has no graph to follow: models with islands are left out.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import zoo_shim
import zoo_timm
import zoo_torchvision
from zoo_run import CONFIG, Case, joined, waken

from kernel_counts import announced, computed
from sparsebit.quantization import QuantModel
from sparsebit.quantization.tools.preflight import preflight

pytestmark = pytest.mark.zoo
CASES = [*zoo_torchvision.CASES, *zoo_timm.CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.package}-{case.name}")
@pytest.mark.filterwarnings("ignore")  # of the packages themselves
def test_announced_is_computed(case: Case, tmp_path: Path) -> None:
    if find_spec(case.package) is None:
        pytest.skip(f"{case.package} is not installed")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    zoo_shim.install()
    torch.manual_seed(0)
    batches = [case.batch(), case.batch()]
    model = waken(case.build(), joined(*batches))
    qmodel = QuantModel(model, CONFIG, example=batches[0])
    if qmodel.islands:
        pytest.skip(f"islands: {', '.join(qmodel.islands)}")
    qmodel.calibrate(batches, progress=False)
    qmodel.set_quant(w_quant=True, a_quant=True)
    found = preflight(qmodel, batches[0])
    report = qmodel.export_onnx(batches[0], str(tmp_path / "model.onnx"))
    assert announced(found) == computed(report), f"{found}\n{report.integer} {report.floating}"
