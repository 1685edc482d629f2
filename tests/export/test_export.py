"""export_onnx: forms of the call, what comes back, what is left behind, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from exported_once import export_once
from torch import Tensor, nn

import sparsebit
from models import images, small_net
from sparsebit import QuantModel
from sparsebit.errors import ExportError
from sparsebit.export import files
from sparsebit.export.backends.onnxruntime import OnnxruntimeBackend
from sparsebit.export.certificate import runtime
from sparsebit.quantization.quantizers import Mode, Quantizer

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


class Two(nn.Module):
    """Inputs of different sizes: mixed up, they do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x) * self.b(y), self.b(y)


def pair(batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 4, generator=g), torch.randn(batch, 6, generator=g)


@pytest.fixture(scope="module")
def two() -> QuantModel:
    torch.manual_seed(0)
    return sparsebit.quantize(Two().eval(), [pair(8, s) for s in range(3)])


@pytest.fixture
def net() -> QuantModel:
    return sparsebit.quantize(small_net(), images())


def run(path: Path, *inputs: Tensor) -> list[np.ndarray]:
    session = runtime.session(
        path, optimised=False
    )  # exact on every CPU, also where two layers share weights
    return session.run(None, {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs)})


def shape_of(value) -> list:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


# -- forms of the call -------------------------------------------------------------------------------------
AXES = {
    "named": (["p", "q"], {"p": {0: "n"}, "q": {0: "n"}, "out": {0: "n"}}),
    "listed": (["p", "q"], {"p": [0], "q": [0]}),
    "forward's names": (None, {"x": {0: "n"}, "y": {0: "n"}}),
    "any names, in order": (None, {"in1": {0: "n"}, "in2": {0: "n"}}),
}


@pytest.mark.parametrize("form", AXES)
def test_dynamic_axes_in_the_old_spellings(two, form, tmp_path):
    names, axes = AXES[form]
    path = tmp_path / "m.onnx"
    two.export_onnx(pair(), str(path), names, ["out", "other"], axes)
    graph = onnx.load(path).graph
    assert [i.name for i in graph.input] == (names or ["x", "y"])
    assert [o.name for o in graph.output] == ["out", "other"]
    assert all(isinstance(shape_of(i)[0], str) and shape_of(i)[1] == n for i, n in zip(graph.input, (4, 6)))
    assert run(path, *pair(7))[0].shape == (7, 5)


def test_dynamic_shapes_and_a_dict_in_another_order(two, tmp_path):
    path, (x, y) = tmp_path / "m.onnx", pair()
    shapes = {"y": {0: "batch"}, "x": {0: "batch"}}
    report = two.export_onnx(
        {"y": y, "x": x}, str(path), dynamic_shapes=shapes, batches=[{"x": x, "y": y}, pair(5)]
    )
    assert report.ok and [i.name for i in onnx.load(path).graph.input] == ["x", "y"]
    two.set_quant(True, True)
    with torch.no_grad():
        for have, want in zip(run(path, *pair(3, 9)), two(*pair(3, 9))):
            torch.testing.assert_close(torch.from_numpy(have), want, atol=0.02, rtol=0)


def test_unknown_axis_name_is_refused(two, tmp_path):
    with pytest.raises(ExportError, match="dynamic_axes: z is not an input or output; inputs are p, q"):
        two.export_onnx(pair(), str(tmp_path / "m.onnx"), ["p", "q"], ["a", "b"], {"z": {0: "n"}})


def test_dummy_that_does_not_fit(two, tmp_path):
    with pytest.raises(ExportError, match="dummy_data: does not fit"):
        two.export_onnx(pair()[0], str(tmp_path / "m.onnx"))
    assert not list(tmp_path.iterdir())


def test_a_batch_of_another_size_says_what_to_do(net, tmp_path, monkeypatch):
    export_once(monkeypatch, "net")
    with pytest.raises(ExportError, match="dynamic_axes"):
        net.export_onnx(images()[0], str(tmp_path / "m.onnx"), batches=images(1, batch=2))
    assert not list(tmp_path.iterdir())


# -- what comes back ---------------------------------------------------------------------------------------
def state_of(qmodel: QuantModel) -> tuple:
    modes = [(m.mode, m.on_export) for m in qmodel.modules() if isinstance(m, Quantizer)]
    weights = {k: v.clone() for k, v in qmodel.state_dict().items()}
    grads = [p.requires_grad for p in qmodel.parameters()]
    return [m.training for m in qmodel.modules()], modes, weights, grads


def same(a: tuple, b: tuple) -> bool:
    return a[:2] == b[:2] and a[3] == b[3] and all(torch.equal(a[2][k], b[2][k]) for k in a[2])


@pytest.mark.parametrize("fails", [None, "to_onnx", "lower", "certify"])
def test_the_model_comes_back_as_it_was(net, tmp_path, monkeypatch, fails):
    export_once(monkeypatch, "net")
    net.train()
    net.model.layer1_0_conv1.eval()
    net.set_quant(True, True)
    net.model.conv1.weight_quantizer.mode = Mode.FLOAT
    before = state_of(net)
    x = images()[0]
    if fails is None:
        net.export_onnx(x, str(tmp_path / "m.onnx"))
    else:
        places = {
            "to_onnx": ("sparsebit.quantization.export.to_onnx", RuntimeError),
            "lower": ("sparsebit.export.onnx.qdq.lower_marks", RuntimeError),
            "certify": ("sparsebit.export.certificate.runtime.run", KeyboardInterrupt),
        }
        where, error = places[fails]

        def stop(*args, **kwargs):
            raise error("stopped")

        monkeypatch.setattr(where, stop)
        with pytest.raises(error):
            net.export_onnx(x, str(tmp_path / "m.onnx"))
        assert not list(tmp_path.iterdir())  # no draft stays behind
    assert same(before, state_of(net))


def test_report_is_returned_printed_saved_and_in_the_file(net, tmp_path, monkeypatch):
    export_once(monkeypatch, "net")
    path = tmp_path / "m.onnx"
    report = net.export_onnx(images()[0], str(path), batches=images())
    saved = json.loads((tmp_path / "m.report.json").read_text())
    assert saved["ok"] and saved["local"]["wrong"] == 0 and saved["bytes"] == path.stat().st_size
    assert set(saved["quantizers"]) == {name for name, _ in net.named_quantizers()}
    assert saved["quantizers"]["layer1_0_conv1.weight_quantizer"]["sparsebit.module"] == "layer1.0.conv1"
    assert saved["end_to_end"]["labels"] == 20
    text = str(report)
    for part in (
        "certificate      holds",
        "noise floor",
        "integer kernels",
        "codes wrong",
        "opset 18 (13 was asked",
    ):
        assert part in text
    props = {p.key: p.value for p in onnx.load(path).metadata_props}
    assert json.loads(props["sparsebit.certificate"])["ok"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.report.json"]


def test_verify_later(net, tmp_path, monkeypatch):
    export_once(monkeypatch, "net")
    path = tmp_path / "m.onnx"
    net.export_onnx(images()[0], str(path))
    report = sparsebit.verify(path, net, images()[1:])
    assert report.ok and report.certificate.codes > 26000 and report.opset == 18
    assert report.certificate.output_error < 1e-5  # the rounded biases are known from the file

    net.model.layer1_0_conv1.weight_quantizer.set_bit(5)  # not the model of the file any more
    report = sparsebit.verify(path, net, images()[1:])
    assert not report.ok and report.certificate.failures()[0].startswith("layer1_0_conv1.weight_quantizer")
    other = sparsebit.quantize(small_net(blocks=1), images())
    with pytest.raises(ExportError, match=r"made from another model: .*layer1_1_conv1\.weight_quantizer"):
        sparsebit.verify(path, other, images())
    with pytest.raises(ExportError, match="there is no such file"):
        sparsebit.verify(tmp_path / "none.onnx", net, images())
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [])), str(tmp_path / "foreign.onnx"))
    with pytest.raises(ExportError, match="not written by Sparsebit"):
        sparsebit.verify(tmp_path / "foreign.onnx", net, images())


# -- files -------------------------------------------------------------------------------------------------
def corrupted(monkeypatch, name: str) -> None:
    """Lowering that writes one weight code wrong."""
    lower = OnnxruntimeBackend.lower

    def broken(self, model, marks):
        import onnx_ir as ir

        lowered = lower(self, model, marks)
        value = model.graph.initializers[f"{name}/codes"]
        codes = value.const_value.numpy().copy()
        codes.flat[3] = 1 - codes.flat[3]
        value.const_value = ir.tensor(codes, name=value.name)
        return lowered

    monkeypatch.setattr(OnnxruntimeBackend, "lower", broken)


def test_failed_certificate_keeps_the_file_apart(net, tmp_path, monkeypatch):
    export_once(monkeypatch, "net")
    path = tmp_path / "m.onnx"
    path.write_bytes(b"the old file")
    corrupted(monkeypatch, "layer1_1_conv1.weight_quantizer")
    with pytest.raises(
        ExportError, match=r"starts at layer1_1_conv1\.weight_quantizer: 1 of 576 codes differ"
    ):
        net.export_onnx(images()[0], str(path))
    assert path.read_bytes() == b"the old file"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.failed.onnx", "m.failed.report.json", "m.onnx"]
    assert not json.loads((tmp_path / "m.failed.report.json").read_text())["ok"]
    onnx.checker.check_model(str(tmp_path / "m.failed.onnx"))


def test_the_first_op_that_diverges_is_named(net, tmp_path, monkeypatch):
    """A wrong constant in an op: the quantizer behind it is named, though everything after it differs too."""
    export_once(monkeypatch, "net")
    lower = OnnxruntimeBackend.lower

    def broken(self, model, marks):
        lowered = lower(self, model, marks)
        node = next(
            n for n in model.graph if n.op_type == "Conv" and "layer1.0.conv1" in str(n.metadata_props)
        )
        node.attributes["pads"] = type(node.attributes["pads"])(
            "pads", node.attributes["pads"].type, [2, 1, 0, 1]
        )
        return lowered

    monkeypatch.setattr(OnnxruntimeBackend, "lower", broken)
    with pytest.raises(ExportError, match=r"starts at layer1_0_conv2\.input_quantizer"):
        net.export_onnx(images()[0], str(tmp_path / "m.onnx"))


def test_an_existing_file_is_replaced_whole(net, tmp_path, monkeypatch):
    export_once(monkeypatch, "net")
    path = tmp_path / "m.onnx"
    path.write_bytes(b"x" * 10_000_000)
    net.export_onnx(images()[0], str(path))
    onnx.checker.check_model(str(path), full_check=True)


def test_models_above_the_limit_of_protobuf(net, tmp_path, monkeypatch):
    export_once(monkeypatch, "net")
    monkeypatch.setattr(files, "LIMIT", 1000)
    path = tmp_path / "m.onnx"
    report = net.export_onnx(images()[0], str(path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data", "m.report.json"]
    assert report.bytes == sum((tmp_path / name).stat().st_size for name in ("m.onnx", "m.onnx.data"))
    assert sparsebit.verify(path, net, images()).ok
    first = run(path, images()[0])[0]
    (tmp_path / "moved").mkdir()
    for name in ("m.onnx", "m.onnx.data"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert np.array_equal(first, run(tmp_path / "moved/m.onnx", images()[0])[0])

    corrupted(monkeypatch, "conv1.weight_quantizer")
    with pytest.raises(ExportError, match="kept as"):
        net.export_onnx(images()[0], str(path))
    assert sorted(p.name for p in tmp_path.iterdir() if "onnx" in p.name) == [
        "m.failed.onnx",
        "m.failed.onnx.data",
    ]
    run(tmp_path / "m.failed.onnx", images()[0])


def test_nothing_of_this_machine_is_in_the_file(net, tmp_path):
    path = tmp_path / "m.onnx"
    net.export_onnx(images()[0], str(path))
    content = path.read_bytes()
    assert b"stack_trace" not in content and b".py" not in content and b"/work" not in content
    assert b"layer1.0.conv1" in content
