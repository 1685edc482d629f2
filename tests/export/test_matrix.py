"""Every weighted op x bits x scheme: the file loads, runs, and has the model's codes, all of them."""

from __future__ import annotations

import json

import pytest
import torch
from exported_once import export_once
from torch import Tensor, nn

from sparsebit import QuantConfig, QuantModel
from sparsebit.export.certificate import runtime
from sparsebit.export.onnx.types import SINCE

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SCHEMES = [
    f"per-{per}-{kind}" for per in ("tensor", "channel") for kind in ("symmetric", "affine")
]  # of W and A
CONVS = ["conv1d", "conv2d", "conv3d", "depthwise", "grouped", "grouped_transpose"]
CONVS += ["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]
OPS = [*CONVS, "flat_linear", "linear", "unbiased", "embedding", "lstm", "gru", "attention", "matmul"]


class EveryOp(nn.Module):
    """One layer per op, side by side; each output is an output of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(4, 6, 3, padding=1)
        self.conv2d = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.conv3d = nn.Conv3d(4, 3, 2)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
        self.grouped = nn.Conv2d(4, 6, 3, groups=2, dilation=2, bias=False)
        self.conv_transpose1d = nn.ConvTranspose1d(4, 6, 3, stride=2)
        self.conv_transpose2d = nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1)
        self.conv_transpose3d = nn.ConvTranspose3d(4, 2, 2, stride=2)
        self.grouped_transpose = nn.ConvTranspose2d(4, 6, 3, groups=2)
        self.flat_linear, self.linear = nn.Linear(8, 5), nn.Linear(8, 5)
        self.unbiased = nn.Linear(8, 5, bias=False)
        self.embedding = nn.Embedding(10, 6)
        self.lstm = nn.LSTM(8, 4, batch_first=True)
        self.gru = nn.GRU(8, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(
        self, line: Tensor, image: Tensor, volume: Tensor, tokens: Tensor, words: Tensor
    ) -> dict[str, Tensor]:
        inputs = {"1d": line, "3d": volume, "2d": image, "depthwise": image, "grouped": image}
        out = {
            name: getattr(self, name)(next(x for key, x in inputs.items() if key in name)) for name in CONVS
        }
        out["flat_linear"] = self.flat_linear(tokens.mean(1))
        out["linear"], out["unbiased"] = self.linear(tokens), self.unbiased(tokens)
        out["matmul"] = torch.matmul(tokens, (tokens * 0.5).transpose(1, 2))
        out["embedding"] = self.embedding(words)
        out["lstm"], out["gru"] = self.lstm(tokens)[0], self.gru(tokens)[0]
        out["attention"] = self.attention(tokens, tokens, tokens)[0]
        return out


def batch(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"line": (2, 4, 9), "image": (2, 4, 6, 6), "volume": (2, 4, 3, 3, 3), "tokens": (2, 3, 8)}
    floats = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    return {**floats, "words": torch.randint(10, (2, 3), generator=g)}


@pytest.fixture(scope="module")
def build():
    """A calibrated model with the schemes and bits asked for."""
    torch.manual_seed(0)
    net = EveryOp().eval()

    def make(w: str, a: str, bits: int, backend: str = "onnxruntime") -> QuantModel:
        config = {
            "BACKEND": backend,
            "W": {"QSCHEME": w, "QUANTIZER": {"BIT": bits}},
            "A": {"QSCHEME": a, "QUANTIZER": {"BIT": bits}},
        }
        model = QuantModel(net, QuantConfig.load(config), example=batch(0))
        return model.calibrate([batch(seed) for seed in range(3)])

    return make


def certified(qmodel: QuantModel, path, **options):
    report = qmodel.export_onnx(batch(7), str(path), **options)
    checks = report.certificate.quantizers
    assert report.ok and sum(check.wrong for check in checks.values()) == 0
    assert report.certificate.at_boundary == 0 and report.certificate.output_error < 1e-5
    assert set(checks) == {name for name, _ in qmodel.named_quantizers()}
    for op in OPS:  # nothing was skipped
        assert any(name.startswith(op) for name in checks), op
    return report


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("shift", range(4), ids=SCHEMES)
def test_every_op_has_the_models_codes(build, bits, shift, tmp_path, monkeypatch):
    """All 4 x 4 pairs of schemes come up over the bits; every bit sees every scheme of W and of A."""
    export_once(monkeypatch, "every op")
    qmodel = build(SCHEMES[shift], SCHEMES[(shift + bits) % 4], bits)
    report = certified(qmodel, tmp_path / "m.onnx")
    assert report.opset == (25 if bits == 2 else 21 if bits < 5 else 18)
    # MatMulNBits rounds the input of products with float activations to 8 bits
    assert report.certificate.runtime.noise_db < -25


@pytest.mark.parametrize("backend", ["virtual", "openvino"])
@pytest.mark.parametrize("bits", [3, 8])
def test_plain_backends(build, backend, bits, tmp_path, monkeypatch):
    export_once(monkeypatch, "every op")
    certified(build("per-channel-affine", "per-channel-symmetric", bits, backend), tmp_path / "m.onnx")


def test_bits_above_eight(build, tmp_path, monkeypatch):
    """virtual simulates them; the file has 16-bit types and saturates at its own range."""
    export_once(monkeypatch, "every op")
    report = certified(
        build("per-channel-symmetric", "per-tensor-affine", 11, "virtual"), tmp_path / "m.onnx"
    )
    assert report.opset == SINCE[16]


@pytest.mark.parametrize("bits", [2, 5])
def test_saturates_where_the_model_does(build, bits, tmp_path, monkeypatch):
    """Inputs four times as large as calibrated: every quantizer saturates, at its own range, not at its type's."""
    export_once(monkeypatch, "every op")
    qmodel = build("per-channel-symmetric", "per-tensor-affine", bits)
    large = {k: v * 4 if v.is_floating_point() else v for k, v in batch(7).items()}
    report = qmodel.export_onnx(batch(7), str(tmp_path / "m.onnx"))
    assert report.ok
    qmodel.set_quant(True, True)
    with torch.no_grad():
        expected = qmodel(**large)
    session = runtime.session(tmp_path / "m.onnx")
    got = session.run(None, {name: value.numpy() for name, value in large.items()})
    for (name, want), have in zip(expected.items(), got):
        torch.testing.assert_close(
            torch.from_numpy(have), want, atol=2e-3, rtol=1e-3, msg=lambda m: f"{name}: {m}"
        )


def test_per_layer_bits_in_one_file(tmp_path, monkeypatch):
    """Mixed bits by SPECIFIC: each quantizer is written with its own, by name."""
    import onnx

    export_once(monkeypatch, "every op")
    names = ["conv2d", "linear", "lstm*", "depthwise", "attention*"]
    wanted = dict(zip(names, (2, 4, 6, 8, 3)))
    torch.manual_seed(0)
    config = QuantConfig.load(
        {
            "BACKEND": "onnxruntime",
            "W": {"SPECIFIC": [{n: ["QUANTIZER.BIT", b]} for n, b in wanted.items()]},
        }
    )
    qmodel = QuantModel(EveryOp().eval(), config, example=batch(0)).calibrate([batch(1)])
    report = certified(qmodel, tmp_path / "m.onnx")
    assert report.opset == 25
    model = onnx.load(tmp_path / "m.onnx")
    nodes = {n.name: {p.key: p.value for p in n.metadata_props} for n in model.graph.node}
    bits = json.loads({p.key: p.value for p in model.metadata_props}["sparsebit.bits"])
    assert bits == {name: quantizer.bit for name, quantizer in qmodel.named_quantizers()}
    for name, known in nodes.items():
        if "sparsebit.quantizer" in known:
            assert known["sparsebit.bits"] == str(bits[known["sparsebit.quantizer"]]), name
    assert nodes["conv2d.weight_quantizer/DQ"]["sparsebit.bits"] == "2"
    assert nodes["linear.weight_quantizer/DQ"]["sparsebit.module"] == "linear"
    kinds = {
        t.name: t.data_type for t in model.graph.initializer
    }  # an LSTM runs in float: so are its weights
    assert kinds["lstm_weight_hh_l0.weight_quantizer/DQ/out"] == onnx.TensorProto.FLOAT
