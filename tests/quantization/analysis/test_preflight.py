"""The pre-flight report: states and reasons, islands, parameters without a quantizer, totals, backends."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsebit
from models import Attention, images, small_net
from sparsebit.export.backends import BACKENDS
from sparsebit.numeric.spec import QuantSpec
from sparsebit.quantization import QuantModel
from sparsebit.quantization.analysis.preflight import preflight

X = images(1)[0]


def states(report):
    return {row.name: f"{row.state}: {row.how}" for row in report.rows}


@torch.fx.wrap
def odd(x):
    return x * 2 if x.sum() > 0 else x


class Mixed(nn.Module):
    """One op for every reason there is."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.table = nn.Parameter(torch.randn(4, 8))
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids, x):
        mask = F.relu(ids)
        x = self.embed(mask) + x
        x = torch.relu(self.fc1(x))
        x = self.fc2(x)
        x = self.norm(x * x)
        x = torch.sigmoid(x.transpose(0, 1)) + self.table[0]
        x = self.fc3(x)
        x[0] = 1
        return odd(x)


def mixed():
    cfg = sparsebit.QuantConfig.load("w4a8").override(
        "W.SPECIFIC",
        [{"fc2": ["QUANTIZER.DISABLE", True]}],
        "A.SPECIFIC",
        [{"norm": ["QUANTIZER.DISABLE", True]}],
    )
    return QuantModel(Mixed().eval(), cfg)


def test_every_op_says_what_happens_to_it():
    report = preflight(mixed(), (torch.arange(6).reshape(2, 3), torch.randn(2, 3, 8)))
    found = states(report)
    assert found["embed"] == "quantized: W4 per-channel symmetric"
    assert found["fc1"] == "quantized: W4 per-channel symmetric / A8 per-tensor affine"
    assert found["relu"] == "float: its input is not floating-point"
    assert found["relu_1"] == "absorbed: into fc1"
    assert found["fc2"] == "quantized: A8 per-tensor affine; weight float: disabled by the config"
    assert found["norm"] == "float: this op is not quantized"
    assert found["transpose"] == "float: moves values only"
    assert found["add"] == "float: A.QADD.ENABLE_QUANT is off"
    assert found["mul"] == "float: this op is not quantized"
    assert found["setitem"] == "float: writes into its input"
    assert found["odd"] == "float: no QModule"
    calls = [n.name for n in mixed().model.graph.nodes if n.op.startswith("call")]
    assert [row.name for row in report.rows] == calls


def test_a_folded_norm_says_where_it_is():
    report = preflight(QuantModel(small_net(), "w8a8"))
    assert {"absorbed: into conv1", "absorbed: into layer1.1.conv2"} <= set(states(report).values())
    assert sum(row.op == "BatchNorm" for row in report.rows) == 5
    kept = preflight(QuantModel(small_net(), {"BACKEND": "virtual", "SCHEDULE": {"FUSE_BN": False}}))
    assert states(kept)["bn1"].startswith("float: ")


def test_the_inputs_of_an_op_belong_to_its_row():
    report = preflight(QuantModel(Attention(), "w8a8"))
    (row,) = [r for r in report.rows if r.name == "matmul"]
    assert (row.op, row.state, row.how) == ("MatMul", "quantized", "A8 per-tensor affine")
    assert row.quantizers == ("matmul_identity0.input_quantizer", "matmul_identity1.input_quantizer")
    assert not any("identity" in r.name for r in report.rows)


def test_parameters_that_no_quantizer_covers():
    report = preflight(mixed())
    found = {u.path: u for u in report.uncovered}
    total = sum(p.nbytes for p in Mixed().parameters())
    assert set(found) == {
        "table",
        "fc2.weight",
        "*.bias of Linear",
        "*.weight of LayerNorm",
        "*.bias of LayerNorm",
    }
    assert found["fc2.weight"].shape == (8, 8) and found["fc2.weight"].bytes == 256
    assert found["*.bias of Linear"].tensors == 3
    assert found["table"].share == pytest.approx(128 / total)
    assert sum(u.bytes for u in report.uncovered) + report.totals["covered_bytes"] == total
    assert [u.bytes for u in report.uncovered] == sorted((u.bytes for u in report.uncovered), reverse=True)


def test_bytes_are_those_of_packed_weights_with_scales():
    totals = preflight(QuantModel(nn.Linear(64, 16), "w4")).totals
    assert totals["bytes"] == 4 * (64 * 16 + 16)
    assert totals["quantized_bytes"] == 64 * 16 // 2 + 16 * 4 + 16 * 4  # codes, scales, bias
    assert totals["covered_bytes"] == 4 * 64 * 16


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def test_tied_weights_count_once():
    totals = preflight(QuantModel(Tied(), "w8a8")).totals
    assert totals["bytes"] == totals["covered_bytes"] == 50 * 8 * 4
    assert totals["quantized_bytes"] == 50 * 8 + 50 * 4


class Stubborn(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        if x.sum() > 0:
            return self.fc(x)
        return self.fc(x) - 1


class WithIsland(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.stubborn = nn.Linear(8, 8), Stubborn()

    def forward(self, x):
        return self.stubborn(self.head(x))


def test_islands_give_the_error_and_the_line():
    report = preflight(QuantModel(WithIsland(), "w8a8"), torch.randn(2, 8))
    (island,) = report.islands
    assert island["path"] == "stubborn" and "control flow" in island["error"]
    assert "test_preflight.py" in island["line"] and "if x.sum() > 0" in island["line"]
    found = states(report)
    assert found["stubborn"].startswith("island: ")
    assert found["stubborn_fc"] == "quantized: W8 per-channel symmetric / A8 per-tensor affine"
    (inner,) = [r for r in report.rows if r.name == "stubborn_fc"]
    assert (inner.path, inner.macs, inner.bytes) == ("stubborn.fc", 2 * 64, 4 * 72)
    assert island["line"] in str(report)


def test_a_model_that_is_one_island():
    report = preflight(QuantModel(Stubborn(), "w8a8"), torch.randn(2, 8))
    assert report.islands[0]["path"] == ""
    assert states(report)["fc"].startswith("quantized: W8")
    assert report.totals["bytes"] == report.totals["covered_bytes"] + 32


def test_a_layer_made_of_layers():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    report = preflight(QuantModel(nn.Sequential(layer), "w8a8"), torch.randn(2, 5, 8))
    found = {row.path: row for row in report.rows}
    assert found["0"].state == found["0.self_attn"].state == "parts"
    assert found["0.self_attn.q_proj"].bytes == 4 * 72 and found["0.self_attn"].bytes == 0
    assert found["0.self_attn"].macs == found["0.self_attn"].quantized_macs == 2 * 2 * 5 * 5 * 8
    assert sum(row.bytes for row in report.rows) == sum(p.nbytes for p in layer.parameters())
    assert report.totals["integer_macs"] == report.totals["macs"]


def test_totals_are_the_sum_of_the_rows():
    report = preflight(QuantModel(small_net(), "w8a8"), X)
    t = report.totals
    assert t["macs"] == sum(r.macs for r in report.rows) == t["quantized_macs"]
    assert t["bytes"] == sum(r.bytes for r in report.rows)
    assert t["quantized_bytes"] == sum(r.quantized_bytes for r in report.rows)
    assert t["calibration_bytes"] >= t["activation_bytes"] > X.nbytes
    assert t["quantized"] + t["absorbed"] + t["float"] == len(report.rows)


def test_text_dict_and_repr():
    report = preflight(QuantModel(small_net(), "w8a8"), X)
    text = str(report)
    assert repr(report) == text and len({len(line) for line in text.splitlines()}) > 1
    for piece in (
        "conv1",
        "W8 per-channel symmetric / A8 per-tensor affine",
        "100.0 % quantized",
        "an estimate",
    ):
        assert piece in text
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["rows"][0]["name"] == "conv1" and plain["totals"] == report.totals
    assert "not counted" in str(preflight(QuantModel(small_net(), "w8a8")))


def test_bits_for_the_picture():
    from sparsebit.graph import to_mermaid
    from sparsebit.quantization.layers import bits_label

    qmodel = QuantModel(WithIsland(), "w4a8")
    text = to_mermaid(qmodel.model, bits_label(qmodel.model))
    assert '["head QLinear W4 A8"]:::quantized' in text
    assert '["stubborn Stubborn W4 A8"]:::quantized' in text


# -- backends ---------------------------------------------------------------------------------------
U8, S8 = QuantSpec(8, False, None), QuantSpec(8, True, 0)
S4, S5, U2, U16 = S8.with_bits(4), S8.with_bits(5), U8.with_bits(2), U8.with_bits(16)


@pytest.mark.parametrize(
    ("backend", "op", "weight", "x", "output", "integer"),
    [
        ("onnxruntime", "Conv2d", S8, U8, True, True),
        ("onnxruntime", "Conv2d", S8, U8, False, False),
        ("onnxruntime", "Linear", S8, U8, False, True),
        ("onnxruntime", "Conv2d", S4, U8, True, False),
        ("onnxruntime", "Conv2d", S5, U2, True, True),
        ("onnxruntime", "Linear", S8, U16, True, False),
        ("onnxruntime", "Linear", S8, QuantSpec(8, False, 1), True, False),
        ("onnxruntime", "Linear", QuantSpec(8, True, 0, group=4), U8, True, False),
        ("onnxruntime", "ConvTranspose2d", S8, U8, True, False),
        ("onnxruntime", "LayerNorm", None, U8, True, False),
        ("tensorrt", "Conv2d", S8, U8, True, False),
        ("tensorrt", "Conv2d", S8, S8, False, True),
        ("openvino", "Conv2d", S8, U8, False, True),
        ("openvino", "Conv2d", S8, U16, True, False),
        ("virtual", "Conv2d", S8, U8, True, False),
    ],
)
def test_backend_rules(backend, op, weight, x, output, integer):
    why = BACKENDS[backend]().why_float(op, weight, [x], output=output)
    assert (not why) is integer


def test_an_addition_keeps_convolutions_in_float_and_the_note_says_so():
    floating = sparsebit.QuantConfig.load("w8a8").override("A.QADD.ENABLE_QUANT", False)
    plain = preflight(QuantModel(small_net(), floating), X)
    assert 0 < plain.totals["integer_macs"] < plain.totals["macs"]
    assert any("A.QADD.ENABLE_QUANT" in note for note in plain.notes)
    full = preflight(QuantModel(small_net(), "w8a8"), X)
    assert full.totals["integer_macs"] == full.totals["macs"] and not full.notes


def test_symmetric_activations_are_called_slow_for_onnxruntime_only():
    qmodel = QuantModel(small_net(), "w8a8-tensorrt")
    assert not preflight(qmodel, X).notes
    assert any("x86" in note for note in preflight(qmodel, X, backend="onnxruntime").notes)
