"""CalibrationRunner as researchers use it: its steps called by hand, or overridden."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsebit.quantization import QuantModel
from sparsebit.quantization.calibration.runner import CalibrationRunner

BATCHES = [torch.randn(8, 4) for _ in range(3)]


def prepared() -> QuantModel:
    torch.manual_seed(0)
    qmodel = QuantModel(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).eval())
    qmodel.prepare_calibration()
    for x in BATCHES:
        qmodel(x)
    return qmodel


def scales(qmodel: QuantModel) -> list[torch.Tensor]:
    return [q.scale.clone() for _, q in qmodel.named_quantizers()]


def test_the_runner_is_there_while_calibrating():
    qmodel = QuantModel(nn.Sequential(nn.Linear(4, 4)))
    assert qmodel.calibration_runner is None
    qmodel.prepare_calibration()
    assert isinstance(qmodel.calibration_runner, CalibrationRunner)
    qmodel(BATCHES[0])
    qmodel.calc_qparams()
    assert qmodel.calibration_runner is None


@pytest.mark.parametrize("asym", [False, True])
def test_a_loop_written_by_hand_gives_the_same_scales(asym):
    expected = prepared()
    expected.calc_qparams(asym=asym, w_quant=asym, a_quant=asym)
    qmodel = prepared()
    runner = qmodel.calibration_runner
    for node in qmodel.model.graph.nodes:
        runner.run_feature_calibration(node, asym)
        outputs = runner.module_forward(3, node, "cpu")
        runner.run_weight_calibration(node, asym, a_quant=True)
        if asym:
            outputs = runner.module_forward(3, node, "cpu", asym=True, w_quant=True, a_quant=True)
        if node.op == "call_module":
            assert len(outputs) == 3
    runner.close()
    for got, want in zip(scales(qmodel), scales(expected)):
        torch.testing.assert_close(got, want)


def test_module_forward_gives_what_the_model_computes():
    qmodel = prepared()
    expected = [qmodel(x) for x in BATCHES]  # three more batches: they count too
    runner = qmodel.calibration_runner
    nodes = [n for n in qmodel.model.graph.nodes if n.op != "output"]
    outputs = [runner.module_forward(6, node, "cpu") for node in nodes][-1]
    torch.testing.assert_close(outputs[3:], expected)


def test_a_subclass_overrides_one_step(monkeypatch):
    seen = []

    class Own(CalibrationRunner):
        def run_weight_calibration(self, node, asym=False, a_quant=False):
            seen.append(node.name)
            super().run_weight_calibration(node, asym, a_quant)

    monkeypatch.setattr("sparsebit.quantization.quant_model.CalibrationRunner", Own)
    qmodel = prepared()
    qmodel.calc_qparams()
    assert [name for name in seen if name.startswith("_")] == ["_0", "_1", "_2"]
