"""Exports as scripts for the original write them: without calibration, of PACT, with integer masks, in its forms."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import small_net
from sparsebit.errors import CalibrationError, ExportError
from sparsebit.export.export_module import export_module
from sparsebit.quantization import QuantModel, parse_qconfig

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def config(
    backend: str = "virtual",
    kinds: str = "uniform uniform",
    bits: tuple[int, int] = (4, 4),
    schemes: str = "per-channel-symmetric per-tensor-affine",
    **weights: Any,
) -> Any:
    sections = {}
    for letter, scheme, kind, bit in zip("WA", schemes.split(), kinds.split(), bits):
        sections[letter] = {"QSCHEME": scheme, "QUANTIZER": {"TYPE": kind, "BIT": bit}}
    sections["W"] |= weights
    sections["A"] |= {"QADD": {"ENABLE_QUANT": True}}
    return parse_qconfig({"BACKEND": backend, **sections})


def calibrated(model: nn.Module, batch: Any, *args: Any, **kwargs: Any) -> QuantModel:
    return QuantModel(model.eval(), config(*args, **kwargs)).calibrate([batch])


def image() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 3, 12, 12)


# -- clips of one value ------------------------------------------------------------------------------------
class Readers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x) + self.c(x) * self.d(x)


class ReadersOfRelu(Readers):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        return self.b(x) + self.c(x) * self.d(x)


class CalledTwice(Readers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x) + self.b(self.b(x)) + self.c(x)


class Clipped(Readers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        low, high = torch.tensor(-0.5), torch.tensor(0.5)
        same = torch.minimum(torch.maximum(x, low), high) * torch.minimum(torch.maximum(x, low), high)
        return same + torch.minimum(torch.maximum(x, -high / 2), high * 2)


@pytest.mark.parametrize("net", [Readers, ReadersOfRelu, CalledTwice], ids=lambda net: net.__name__)
@pytest.mark.parametrize(
    ("bit", "kinds", "scheme"), [(4, "uniform pact", "affine"), (2, "dorefa pact", "symmetric")]
)
def test_pact_with_several_readers(net, bit, kinds, scheme, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    schemes = f"per-channel-symmetric per-tensor-{scheme}"
    qmodel = calibrated(net(), x, "virtual", kinds, (bit, bit), schemes)
    if bit == 2:  # bounds that training moved apart
        for place, (_, quantizer) in enumerate(qmodel.named_quantizers()):
            if quantizer.TYPE == "pact":
                quantizer.alpha.data *= 1 - 0.1 * place
    assert qmodel.export_onnx(x, str(tmp_path / "pact.onnx"), extra_info=True).ok


def test_clips_of_one_value_in_a_float_model(tmp_path):
    path = tmp_path / "clips.onnx"
    assert export_module(Clipped().eval(), torch.randn(8, 4), path).ok
    bounds = [node.input[1:] for node in onnx.load(path).graph.node if node.op_type == "Clip"]
    assert len({name for pair in bounds for name in pair}) == 2 * len(bounds)


# -- integer masks -----------------------------------------------------------------------------------------
LOWEST = torch.finfo(torch.float32).min
MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "1.0 - mask": lambda x, mask: x + (1.0 - mask) * -10000.0,
    "finfo": lambda x, mask: x + (1.0 - mask[:, None].squeeze(1)) * LOWEST,
    "rsub": lambda x, mask: x + torch.rsub(mask, 1.0, alpha=2),
    "tril": lambda x, mask: x + (1.0 - torch.tril(mask)) * -1e4,
    "number // mask": lambda x, mask: x + 5.5 // (mask + 1) + 5 // (mask + 1),
    "mask // number": lambda x, mask: x + mask // 2.0 + (mask == 1) // 2,
    "number // x": lambda x, mask: 5.0 // (x.abs() + mask + 1),
    "mask ** x": lambda x, mask: (mask + 1) ** x + x.abs() ** (mask == 1),
    "bounds of two types": lambda x, mask: (
        x.clamp(0, 0.5) + torch.clip(x, min=-0.5, max=1) + mask.clamp(0, 0.5)
    ),
}


class Masked(nn.Module):
    def __init__(self, form: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.fc, self.form = nn.Linear(4, 4), form

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.form(self.fc(x), mask)


def batch_with_mask(dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4), torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1]], dtype=dtype)


@pytest.mark.parametrize("form", MASKED)
def test_operands_of_two_types(form, tmp_path):
    batch = batch_with_mask()
    qmodel = calibrated(Masked(MASKED[form]), batch, bits=(8, 8))
    assert qmodel.export_onnx(batch, str(tmp_path / "mask.onnx")).ok


def test_an_integer_mask_in_a_float_model(tmp_path):
    model = Masked(MASKED["1.0 - mask"]).eval()
    assert export_module(model, batch_with_mask(), tmp_path / "mask.onnx").ok


@pytest.mark.parametrize(("dtype", "trace"), [(torch.int32, "fx"), (torch.uint8, "export")])
def test_other_integers_and_traces(dtype, trace, tmp_path):
    batch = batch_with_mask(dtype)
    model = Masked(MASKED["1.0 - mask"]).eval()
    qmodel = QuantModel(model, config(bits=(8, 8)), example=batch, trace=trace).calibrate([batch])
    axes = {"x": {0: "batch"}, "mask": {0: "batch"}}
    assert qmodel.export_onnx(batch, str(tmp_path / "mask.onnx"), dynamic_axes=axes).ok


# -- without calibration -----------------------------------------------------------------------------------
def test_an_export_without_calibration(tmp_path, caplog):
    path = tmp_path / "w4a4.onnx"
    qmodel = QuantModel(small_net(), config())
    qmodel.eval()
    before = {name: value.clone() for name, value in qmodel.state_dict().items()}
    with caplog.at_level(logging.WARNING, logger="sparsebit"):
        report = qmodel.export_onnx(image(), str(path), extra_info=True)
    said = [record for record in caplog.records if "not calibrated" in record.getMessage()]
    assert [(record.name, record.levelno) for record in said] == [("sparsebit", logging.WARNING)]
    assert report.ok and report.uncalibrated
    assert "not calibrated" in str(report).splitlines()[0]
    assert json.loads((tmp_path / "w4a4.report.json").read_text())["uncalibrated"]
    told = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert json.loads(told["sparsebit.certificate"])["uncalibrated"]
    extra = onnx.load(tmp_path / "w4a4_extra.onnx")
    assert {a.i for node in extra.graph.node for a in node.attribute if a.name == "bits"} == {4}
    scales = [onnx.numpy_helper.to_array(t) for t in extra.graph.initializer if t.name.endswith("/scale")]
    assert scales and all((scale == 1).all() for scale in scales)

    after = qmodel.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    with pytest.raises(CalibrationError, match="no scale yet"):
        qmodel.set_quant(True, True)
    assert not qmodel.calibrate([image()]).export_onnx(image(), str(path)).uncalibrated


@pytest.mark.parametrize(
    ("backend", "kinds", "bits", "schemes"),
    [
        ("virtual", "lsq lsq", (2, 2), "per-channel-symmetric per-tensor-affine"),
        ("virtual", "lsq+ lsq+", (3, 5), "per-channel-symmetric per-tensor-affine"),
        ("virtual", "dorefa pact", (4, 4), "per-channel-symmetric per-tensor-symmetric"),
        ("virtual", "adaround uniform", (6, 7), "per-tensor-affine per-channel-affine"),
        ("onnxruntime", "uniform uniform", (8, 8), "per-channel-symmetric per-tensor-affine"),
        ("onnxruntime", "uniform uniform", (4, 4), "per-channel-symmetric per-tensor-affine"),
        ("tensorrt", "uniform uniform", (8, 8), "per-channel-symmetric per-tensor-symmetric"),
    ],
)
def test_every_quantizer_without_calibration(backend, kinds, bits, schemes, tmp_path):
    model = small_net()
    for parameter in model.parameters():
        parameter.data *= 5  # codes other than 0
    qmodel = QuantModel(model, config(backend, kinds, bits, schemes))
    before = [id(parameter) for parameter in qmodel.parameters()]
    report = qmodel.export_onnx(image() * 5, str(tmp_path / "m.onnx"), extra_info=True)
    assert report.ok and report.uncalibrated
    assert [id(parameter) for parameter in qmodel.parameters()] == before  # an optimizer still knows them


def test_groups_without_calibration(tmp_path):
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    qmodel = QuantModel(model, config("onnxruntime", bits=(4, 8), GROUP=32))
    assert qmodel.export_onnx(torch.randn(2, 64), str(tmp_path / "m.onnx")).ok


class AddMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.fc(x) + mask


def test_a_quantizer_that_gets_integers_without_calibration(tmp_path):
    qmodel = QuantModel(AddMask(), config())
    report = qmodel.export_onnx((torch.randn(2, 8), torch.ones(2, 8).long()), str(tmp_path / "m.onnx"))
    assert report.ok and "add_identity1.input_quantizer" not in report.quantizers


def test_scales_come_back_after_an_error(tmp_path):
    qmodel = QuantModel(small_net(), config())
    with pytest.raises(ExportError, match="translate conv1"):
        qmodel.export_onnx(torch.randn(2, 7, 12, 12), str(tmp_path / "m.onnx"))
    assert not any(quantizer.calibrated for _, quantizer in qmodel.named_quantizers())
    assert not list(tmp_path.iterdir())


# -- the forms of old scripts ------------------------------------------------------------------------------
def test_a_script_without_calibration(tmp_path):
    path = str(tmp_path / "x.onnx")
    outer = [{"conv1": ["QUANTIZER.BIT", 8]}, {"fc": ["QUANTIZER.BIT", 8]}]
    qmodel = QuantModel(small_net(), config(kinds="lsq lsq", SPECIFIC=outer))
    qmodel.train()

    def state() -> Any:
        modes = [quantizer.mode for _, quantizer in qmodel.named_quantizers()]
        return (
            [m.training for m in qmodel.modules()],
            modes,
            qmodel.device,
            list(map(id, qmodel.parameters())),
        )

    before = state()
    axes = {"input": {0: "batch"}, "output": {0: "batch"}}
    for dummy in (image(), (image(),), {"x": image()}):  # to the same path
        report = qmodel.export_onnx(dummy, path, ["input"], ["output"], axes, 13, False, True)
        assert report.ok and state() == before
    bits = {name: told["sparsebit.bits"] for name, told in report.quantizers.items()}
    assert bits["conv1.weight_quantizer"] == bits["fc.weight_quantizer"] == "8"
    assert bits["conv1.input_quantizer"] == "4"
    (found,) = ort.InferenceSession(path).run(["output"], {"input": torch.randn(5, 3, 12, 12).numpy()})
    assert found.shape == (5, 10)


def test_names_without_onnx_have_reports_of_their_own(tmp_path):
    for name in ("net.v1", "net.v2"):
        export_module(nn.Linear(2, 2).eval(), torch.randn(1, 2), tmp_path / name)
    expected = ["net.v1", "net.v1.report.json", "net.v2", "net.v2.report.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected
