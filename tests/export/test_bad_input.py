"""What export_onnx refuses: before any file is touched, saying where, what and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from models import images, small_net
from sparsebit import QuantConfig, QuantModel
from sparsebit.errors import ExportError
from sparsebit.export import files
from sparsebit.export.onnx import to_onnx

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def net() -> QuantModel:
    return sparsebit.quantize(small_net(), images())


def test_calibrated_in_part(tmp_path):
    qmodel = sparsebit.quantize(small_net(), images())
    qmodel.model.conv1.input_quantizer.scale.zero_()
    with pytest.raises(ExportError, match=r"conv1\.\w+_quantizer has no scale yet: calibrate"):
        qmodel.export_onnx(images()[0], str(tmp_path / "m.onnx"))
    assert not list(tmp_path.iterdir())


def test_unwritable_paths(net, tmp_path, monkeypatch):
    monkeypatch.setattr("sparsebit.quantization.export.to_onnx", None)  # refused before any work
    for path, reason in ((tmp_path, "is a folder"), (tmp_path / "no/m.onnx", "does not exist")):
        with pytest.raises(ExportError, match=reason):
            net.export_onnx(images()[0], str(path))
    monkeypatch.setattr(files.os, "access", lambda *args: False)
    with pytest.raises(ExportError, match="cannot be written"):
        net.export_onnx(images()[0], str(tmp_path / "m.onnx"))


def test_missing_packages(net, tmp_path, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ExportError, match=r"needs onnx, onnxscript, onnxruntime: pip install 'sparsebit\[onnx\]'"
    ):
        net.export_onnx(images()[0], str(tmp_path / "m.onnx"))


def test_backends_can_be_listed_without_onnx():
    import subprocess
    import sys

    code = (
        "import sys; sys.modules.update(onnx=None, onnx_ir=None, onnxruntime=None, onnxscript=None)\n"
        "import sparsebit.quantization.export as e; print(sorted(e.BACKENDS))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "['onnxruntime', 'openvino', 'tensorrt', 'virtual']", out.stderr


class Eigen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(self.fc(x)).abs()


def test_an_op_that_cannot_be_translated_is_named_with_its_module(tmp_path, capfd):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Eigen()))
    qmodel = sparsebit.quantize(model.eval(), [torch.randn(4, 4)])
    capfd.readouterr()
    with pytest.raises(ExportError, match=r"cannot translate 1\.0.*linalg_eig"):
        qmodel.export_onnx(torch.randn(4, 4), str(tmp_path / "m.onnx"))
    assert not list(tmp_path.iterdir()) and not capfd.readouterr().err


def test_unknown_backend(net, tmp_path):
    with pytest.raises(Exception, match="openvino"):
        net.export_onnx(images()[0], str(tmp_path / "m.onnx"), backend="openvinoo")


def test_more_bits_than_the_backend_holds(tmp_path):
    config = QuantConfig.load({"BACKEND": "virtual", "W": {"QUANTIZER": {"BIT": 12}}})
    qmodel = QuantModel(small_net(), config).calibrate(images())
    with pytest.raises(
        ExportError, match=r"(?s)conv1.weight_quantizer: onnxruntime has no kernels.*12 bits.*fix: W.QUA"
    ):
        qmodel.export_onnx(images()[0], str(tmp_path / "m.onnx"), backend="onnxruntime")
    assert not list(tmp_path.iterdir())


def test_require_names_only_what_is_missing():
    to_onnx.require("torch")
    with pytest.raises(ExportError, match="needs nowhere_to_be_found:"):
        to_onnx.require("torch", "nowhere_to_be_found")
