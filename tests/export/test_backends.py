"""What each backend refuses, with reason and fix; opsets; sizes; plain QDQ for the others."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from exported_once import export_once
from torch import Tensor, nn

import sparsebit
from models import images, small_net
from sparsebit.errors import ExportError
from sparsebit.export.backends import BACKENDS
from sparsebit.export.certificate import runtime
from sparsebit.export.certificate.openvino_runtime import OpenvinoSession
from sparsebit.export.onnx.marks import Mark, emit
from sparsebit.export.onnx.types import container, container_bits
from sparsebit.numeric import QParams, QuantSpec

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def mark(weight: bool = False, zero: float = 0.0, scales: int = 1, **spec) -> Mark:
    params = QParams(torch.ones(scales), torch.full((scales,), zero))
    return Mark("layer.q", "layer", QuantSpec(**spec), params, torch.zeros(4, 4) if weight else None)


# -- TensorRT ----------------------------------------------------------------------------------------------
RULES = {
    "affine": (mark(symmetric=False), "no zero point and no uint8", "A.QSCHEME: per-tensor-symmetric"),
    "affine weight": (mark(True, symmetric=False), "no zero point", "W.QSCHEME: per-channel-symmetric"),
    "zero point": (mark(zero=3), "zero point is not 0", "calibrate again"),
    "activation per channel": (mark(scales=4, axis=1), "one scale per activation", "A.QSCHEME"),
    "4-bit activation": (mark(bits=4), "no 4-bit activations", "A.QUANTIZER.BIT: 8"),
    "4-bit weight": (mark(True, bits=4), "no 4-bit weights", "groups of 64 or 128"),
    "2-bit weight": (mark(True, bits=2), "no 2-bit weights", "W.QUANTIZER.BIT: 8"),
}


@pytest.mark.parametrize("rule", RULES)
def test_tensorrt_rules(rule):
    asked, reason, fix = RULES[rule]
    (problem,) = BACKENDS["tensorrt"]().problems(asked)
    assert problem.name == "layer.q" and reason in problem.reason and fix in problem.fix


@pytest.mark.parametrize("good", [mark(), mark(True), mark(True, scales=4, axis=0)])
def test_what_tensorrt_takes(good):
    assert not BACKENDS["tensorrt"]().problems(good)


def test_tensorrt_wants_scales_along_the_output_channels(tmp_path, monkeypatch):
    qmodel = sparsebit.quantize(small_net(), images(), "w8a8-tensorrt")
    qmodel.model.layer1_0_conv1.weight_quantizer.set_ch_axis(1)
    with pytest.raises(ExportError, match=r"layer1_0_conv1\.weight_quantizer: its scales lie along axis 1"):
        qmodel.export_onnx(images()[0], str(tmp_path / "m.onnx"))
    assert not list(tmp_path.iterdir())


def test_tensorrt_says_all_problems_at_once_before_any_file(tmp_path):
    qmodel = sparsebit.quantize(small_net(), images())
    with pytest.raises(
        ExportError, match=r"(?s)tensorrt cannot hold this model:.*input_quantizer.*fix:.*and \d+ more"
    ):
        qmodel.export_onnx(images()[0], str(tmp_path / "m.onnx"), backend="tensorrt")
    assert not list(tmp_path.iterdir())


class HalfQuantized(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return emit(x, "add.q") + y


def test_tensorrt_wants_both_inputs_of_an_add():
    program = torch.onnx.export(
        HalfQuantized(), (torch.randn(2, 3), torch.randn(2, 3)), dynamo=True, verbose=False
    )
    with pytest.raises(
        ExportError, match=r"(?s)one input of its Add is quantized.*A.QADD.ENABLE_QUANT: true"
    ):
        BACKENDS["tensorrt"]().lower(program.model, {"add.q": mark()})


def test_a_tensorrt_file_is_int8_without_zero_points(tmp_path):
    path = tmp_path / "m.onnx"
    report = sparsebit.quantize(small_net(), images(), "w8a8-tensorrt").export_onnx(images()[0], str(path))
    graph = onnx.load(path).graph
    assert report.ok and report.backend == "tensorrt"
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    zeros = [arrays[n.input[2]] for n in graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert zeros and all(z.dtype.name == "int8" and not z.any() for z in zeros)
    assert not any(t.name.endswith("bias/codes") for t in graph.initializer)  # biases stay float
    for node in graph.node:  # both inputs of every residual addition
        if node.op_type == "Add":
            made = {n.output[0]: n.op_type for n in graph.node}
            assert [made.get(i) for i in node.input] == ["DequantizeLinear", "DequantizeLinear"]


# -- types and opsets --------------------------------------------------------------------------------------
def test_types_hold_their_grids():
    for bits in range(1, 17):
        for symmetric in (True, False):
            for weight in (True, False):
                held = mark(weight, bits=bits, symmetric=symmetric)
                kind = str(container(held))
                assert kind.startswith("int" if symmetric else "uint")
                assert container_bits(held) in (2, 4, 8, 16) and container_bits(held) >= bits
                assert weight or container_bits(held) >= 8
    assert [container_bits(mark(True, bits=b)) for b in range(2, 9)] == [2, 4, 4, 8, 8, 8, 8]


OPSETS = [  # weight bits, asked -> written, why
    (8, 13, 18, "13 was asked; 18 is the lowest that torch's exporter writes"),
    (8, 18, 18, "as asked"),
    (8, 21, 21, "as asked"),
    (4, 13, 21, "13 was asked; 21 is the first with int4"),
    (3, 18, 21, "18 was asked; 21 is the first with int4"),
    (2, 13, 25, "13 was asked; 25 is the first with int2"),
    (4, 25, 25, "as asked; onnxruntime has fewer integer kernels from opset 22 on"),
]


@pytest.mark.parametrize("bits, asked, written, why", OPSETS)
def test_the_lowest_opset_never_lower_than_asked(bits, asked, written, why):
    marks = {"w": mark(True, bits=bits), "a": mark(bits=bits)}
    assert BACKENDS["onnxruntime"]().opset(marks, asked) == (written, why)


def test_the_opset_is_in_the_file(tmp_path, monkeypatch):
    export_once(monkeypatch, "net")
    qmodel = sparsebit.quantize(small_net(), images())
    for asked, written in ((13, 18), (19, 19)):
        report = qmodel.export_onnx(images()[0], str(tmp_path / "m.onnx"), opset_version=asked)
        model = onnx.load(tmp_path / "m.onnx")
        assert [o.version for o in model.opset_import if o.domain == ""] == [written] == [report.opset]


def test_an_opset_that_does_not_exist(tmp_path):
    qmodel = sparsebit.quantize(small_net(), images())
    with pytest.raises(ExportError, match="opset_version: 99"):
        qmodel.export_onnx(images()[0], str(tmp_path / "m.onnx"), opset_version=99)
    assert not list(tmp_path.iterdir())


# -- sizes -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset, most", [("w8a8", 0.27), ("w8", 0.27), ("w4", 0.14), ("w4a4", 0.14)])
def test_sizes(preset, most, tmp_path, monkeypatch):
    """Of the float file, on a net of about a million weights."""
    export_once(monkeypatch, f"wide-{'a' in preset}")
    data = images(1, batch=1, size=6)
    qmodel = sparsebit.quantize(small_net(channels=192), data, preset)
    floats = 4 * sum(p.numel() for p in small_net(channels=192).parameters())
    path = tmp_path / "m.onnx"
    report = qmodel.export_onnx(data[0], str(path))
    assert report.ok and report.bytes == path.stat().st_size <= most * floats
    props = {p.key: p.value for p in onnx.load(path).metadata_props}
    assert all(len(json.dumps(props[key])) < 5000 for key in props), {k: len(v) for k, v in props.items()}


# -- openvino ----------------------------------------------------------------------------------------------
def test_openvino_refuses_more_than_eight_bits():
    (problem,) = BACKENDS["openvino"]().problems(mark(bits=12))
    assert "8 bits" in problem.reason and problem.fix == "A.QUANTIZER.BIT: 8"


def test_openvino_runs_the_file_as_second_runtime(tmp_path, monkeypatch):
    pytest.importorskip("openvino")
    export_once(monkeypatch, "net")
    qmodel = sparsebit.quantize(small_net(), images())
    report = qmodel.export_onnx(images()[0], str(tmp_path / "m.onnx"), backend="openvino", batches=images())
    assert report.others["openvino"].labels == 20 and report.others["openvino"].noise_db < -30


class FakeOpenvino(ModuleType):
    """openvino's API as far as it is used, computing with onnxruntime: ports know their names, results their ports."""

    class Port:
        def __init__(self, name: str):
            self.any_name = name

    class Compiled:
        def __init__(self, path: str):
            self.session = runtime.session(path, optimised=False)
            self.inputs = [FakeOpenvino.Port(i.name) for i in self.session.get_inputs()]
            self.outputs = [FakeOpenvino.Port(o.name) for o in self.session.get_outputs()]

        def __call__(self, given: dict) -> dict:
            return dict(zip(self.outputs, self.session.run(None, given)))

    class Core:
        def compile_model(self, path: str, device: str, options: dict) -> object:
            assert device == "CPU" and options == {"INFERENCE_PRECISION_HINT": "f32"}
            if not path.endswith(".onnx"):
                raise RuntimeError("cannot read that")
            return FakeOpenvino.Compiled(path)


def test_the_code_for_openvino_runs(tmp_path, monkeypatch):
    """Where openvino itself is not installed: another runtime in its place."""
    fake = FakeOpenvino("openvino")
    fake.__spec__ = ModuleSpec("openvino", None)
    monkeypatch.setitem(sys.modules, "openvino", fake)
    export_once(monkeypatch, "net")
    qmodel = sparsebit.quantize(small_net(), images())
    report = qmodel.export_onnx(images()[0], str(tmp_path / "m.onnx"), backend="openvino", batches=images())
    other = report.others["openvino"]
    assert other.labels == 20 and other.noise_db == report.certificate.runtime.noise_db < -30
    assert "in openvino" in str(report) and not any("not installed" in note for note in report.notes)
    with pytest.raises(ExportError, match="OpenVINO does not load the file: cannot read that"):
        OpenvinoSession(tmp_path / "m.txt")


def test_openvino_is_optional(tmp_path, monkeypatch):
    export_once(monkeypatch, "net")
    monkeypatch.setattr("sparsebit.export.certificate.openvino_runtime.installed", lambda: False)
    qmodel = sparsebit.quantize(small_net(), images())
    report = qmodel.export_onnx(images()[0], str(tmp_path / "m.onnx"), backend="openvino")
    assert report.ok and "openvino" not in report.others and any("openvino" in note for note in report.notes)


def test_a_backend_of_the_user_is_named_in_yaml(tmp_path, monkeypatch):
    """One class: the config finds it by its name, and its limits are checked when the config is read."""
    from sparsebit.errors import ConfigError
    from sparsebit.export.backends import BACKENDS, Backend

    monkeypatch.setattr(BACKENDS, "_items", dict(BACKENDS._items))

    @BACKENDS.register()
    class ShiftBackend(Backend):
        TYPE = "shift"
        BITS = {"W": (8,), "A": (8,)}
        INTEGER_OPS = ("*Linear*",)

        def lower(self, model, marks):
            from sparsebit.export.onnx.qdq import lower_marks

            return lower_marks(model, marks)

    (tmp_path / "q.yaml").write_text("BACKEND: Shift\n")
    config = sparsebit.QuantConfig.load(str(tmp_path / "q.yaml"))
    assert config.backend == "shift"
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 4)).eval(), torch.randn(4, 8)
    assert sparsebit.preflight(model, x, config).totals["integer_macs"] == 32 * 4
    report = sparsebit.quantize(model, [x], config).export_onnx(x, str(tmp_path / "m.onnx"))
    assert report.ok and report.backend == "shift"
    with pytest.raises(ConfigError, match="shift runs weights of 8 bits, not 4"):
        config.override("W.QUANTIZER.BIT", 4)
    with pytest.raises(ConfigError, match="did you mean shift"):
        sparsebit.QuantConfig.load({"BACKEND": "shif"})
