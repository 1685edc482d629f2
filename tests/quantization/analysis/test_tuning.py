"""timing=True and tune=True: where the time of a file goes, and layers that stay float because integers are slower."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from sparsebit.errors import ExportError
from sparsebit.quantization import QuantModel

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from sparsebit.export.certificate import timing
from sparsebit.export.certificate.runtime import kernels


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=4),
        nn.ReLU(),
        nn.Conv2d(16, 16, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    ).eval()


# groups of 4 channels would be float from the start; here `tune` finds them
NARROW_GROUPS_TOO = sparsebit.QuantConfig.load("w8a8").override("SCHEDULE.WHOLLY_FLOAT", False)
BATCHES = [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def quantized() -> QuantModel:
    return sparsebit.quantize(network(), BATCHES, NARROW_GROUPS_TOO, progress=False)


def test_the_times_of_ops_make_up_the_file(tmp_path: Path) -> None:
    report = quantized().export_onnx(BATCHES[0], str(tmp_path / "m.onnx"), ["x"], timing=True)
    found = report.timing
    assert found is not None and found.milliseconds > 0 and found.float_milliseconds > 0
    macs = {op.node: op.macs for op in found.ops if op.macs}
    # 2 images of 8 x 8 pixels; the weights of a group read 4 channels
    assert sorted(macs.values()) == sorted(
        [2 * 64 * 16 * 27, 2 * 64 * 16 * 36, 2 * 64 * 16 * 16, 2 * 10 * 16 * 64]
    )
    assert found.integer_macs == 1.0 and 0 < found.integer_time <= 1
    assert {found.modules[node] for node in macs} == {"0", "2", "4", "7"}
    assert "of the MACs in integers" in str(report)
    assert report.as_dict()["timing"]["most"][0]["about"]


def test_a_float_op_is_named_with_its_reason(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2, 2)).eval()
    qmodel = sparsebit.quantize(net, BATCHES, NARROW_GROUPS_TOO, progress=False)
    report = qmodel.export_onnx(BATCHES[0], str(tmp_path / "m.onnx"), ["x"], timing=True)
    lines = "\n".join(report.timing.lines(report.why_float))
    assert "2 (ConvTranspose): float, because onnxruntime has no integer kernel for ConvTranspose" in lines


def measured(monkeypatch: pytest.MonkeyPatch, slow: tuple[str, ...], times: dict[str, float]) -> None:
    """The profiler finds these layers slower in integers, and whole files take these times."""
    real = timing.profile

    def profile(path: Path, given: dict) -> tuple[list, dict]:
        ops, modules = real(path, given)
        factor = 2.0 if path.stem == "float" else 1.0
        changed = []
        for op in ops:
            microseconds = 10.0 if modules.get(op.node) in slow else factor
            changed.append(timing.OpTime(op.node, op.op, microseconds, op.macs, op.integer))
        if path.stem == "float":
            changed = [timing.OpTime(o.node, o.op, 2.0, o.macs, o.integer) for o in changed]
        return changed, modules

    monkeypatch.setattr(timing, "profile", profile)
    monkeypatch.setattr(timing, "best_times", lambda files, given: {name: times[name] for name in files})


TIMES = {"quantized": 2.0, "mixed": 1.0, "float": 3.0, "new": 1.0}


def test_slow_layers_stay_float_in_model_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, ("2",), TIMES)
    qmodel = quantized()
    report = qmodel.export_onnx(BATCHES[0], str(tmp_path / "m.onnx"), ["x"], batches=BATCHES[1:], tune=True)
    integer, floating = kernels(tmp_path / "m.onnx")
    assert report.ok and "1 layers stay float (_2" in report.notes[-1]
    assert integer["QLinearConv"] == 2 and sum(floating[op] for op in ("Conv", "FusedConv")) == 1
    assert qmodel.model._2.weight_quantizer.absorbed
    qmodel.save(str(tmp_path / "saved"))
    again = QuantModel.load(str(tmp_path / "saved"), network(), example=BATCHES[0])
    assert torch.equal(again(BATCHES[0]), qmodel(BATCHES[0]))


@pytest.mark.parametrize("times", [{"quantized": 1.0}, {"quantized": 1.0, "mixed": 0.99}])
def test_nothing_changes_where_nothing_is_gained(times, tmp_path, monkeypatch) -> None:
    measured(monkeypatch, ("2",), TIMES | times)
    qmodel = quantized()
    before: Tensor = qmodel(BATCHES[0])
    report = qmodel.export_onnx(BATCHES[0], str(tmp_path / "m.onnx"), ["x"], tune=True)
    assert "every layer stays as it was" in report.notes[-1] and not report.floating
    assert torch.equal(before, qmodel(BATCHES[0]))


def test_a_file_slower_than_float_does_not_come_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, ("2",), TIMES | {"float": 0.5})
    qmodel = quantized()
    report = qmodel.export_onnx(BATCHES[0], str(tmp_path / "m.onnx"), ["x"], tune=True)
    assert "so the file is float" in report.notes[-1] and not report.integer
    assert torch.allclose(qmodel(BATCHES[0]), network()(BATCHES[0]), atol=1e-5)


def test_tune_is_for_onnxruntime(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="tune"):
        quantized().export_onnx(BATCHES[0], str(tmp_path / "m.onnx"), backend="openvino", tune=True)
