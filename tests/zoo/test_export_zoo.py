"""The zoo as ONNX files: every file is certified in a plain session, and pre-flight announced its integer kernels.

Models are torchvision's, timm's and transformers', with random weights. Pre-flight cannot follow a part that torch.fx
cannot trace, so models with islands are only exported. Of models with functions that are wrapped as one op (windowed
attention) only the integer kernels are counted: the float ones inside are not seen.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import zoo_shim
import zoo_timm
import zoo_torchvision
import zoo_transformers
from zoo_run import CONFIG, Case, joined, params, waken

from kernel_counts import announced, computed
from sparsebit.quantization import QuantModel
from sparsebit.quantization.tools.preflight import preflight

CASES = [*zoo_torchvision.CASES, *zoo_timm.CASES, *zoo_transformers.CASES]


@pytest.mark.parametrize("case", params(CASES))
@pytest.mark.filterwarnings("ignore")  # of the packages themselves
def test_the_file_is_right_and_as_announced(case: Case, tmp_path: Path) -> None:
    if find_spec(case.package) is None:
        pytest.skip(f"{case.package} is not installed")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    zoo_shim.install()
    torch.manual_seed(0)
    batches = [case.batch(), case.batch()]
    model = waken(case.build(), joined(*batches))
    for part in model.modules():  # encoder and decoder have configs of their own
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False  # a file gives only tensors
    qmodel = QuantModel(model, CONFIG, example=batches[0])
    qmodel.calibrate(batches, progress=False)
    qmodel.set_quant(w_quant=True, a_quant=True)
    found = preflight(qmodel, batches[0])
    report = qmodel.export_onnx(batches[0], str(tmp_path / "model.onnx"), batches=batches[1:])
    assert report.ok
    if not qmodel.islands:
        wrapped = any(row.how == "no QModule" for row in found.rows)
        expected, counted = announced(found), computed(report)
        kinds = [kind for kind in expected | counted if kind.startswith("integer") or not wrapped]
        differ = {kind: (expected[kind], counted[kind]) for kind in kinds if expected[kind] != counted[kind]}
        assert not differ, f"announced, in the file: {differ}\n{report.why_float}"
