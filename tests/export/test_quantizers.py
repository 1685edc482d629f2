"""Every quantizer exports what it computes: learned scales and zero points, tanh, learned clips, sub-8-bit ranges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exported_once import export_once
from torch import nn

import sparsebit
from models import images, small_net
from sparsebit import QuantConfig, QuantModel
from sparsebit.export.certificate import runtime
from sparsebit.quantization.quantizers import Quantizer

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

AFFINE, SYMMETRIC = "per-tensor-affine", "per-tensor-symmetric"
PAIRS = [  # W type, A type, A scheme
    ("lsq", "lsq", SYMMETRIC),
    ("lsq", "lsq", AFFINE),
    ("lsq+", "lsq+", AFFINE),
    ("dorefa", "pact", AFFINE),
    ("dorefa", "pact", SYMMETRIC),
    ("uniform", "dorefa", SYMMETRIC),
]


def learned(w: str, a: str, scheme: str, bits: int) -> QuantModel:
    """A model whose scales, zero points and clips have moved away from where calibration put them."""
    config = {
        "BACKEND": "onnxruntime",
        "SCHEDULE": {"FUSE_BN": True},
        "W": {"QSCHEME": "per-channel-symmetric", "QUANTIZER": {"TYPE": w, "BIT": bits}},
        "A": {"QSCHEME": scheme, "QUANTIZER": {"TYPE": a, "BIT": bits}},
    }
    qmodel = QuantModel(small_net(), QuantConfig.load(config)).calibrate(images())
    g = torch.Generator().manual_seed(3)
    for module in qmodel.modules():
        if isinstance(module, Quantizer):
            for p in module.parameters():
                p.data *= 1 + 0.2 * torch.rand(p.shape, generator=g)
                if p is module.zero_point:
                    p.data += 0.3
    qmodel.set_quant(True, True)
    return qmodel


def both(qmodel: QuantModel, path, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The outputs of the model and of the file, as users run it."""
    with torch.no_grad():
        expected = qmodel(x).numpy()
    return expected, runtime.session(path).run(None, {"x": x.numpy()})[0]


def close(expected: np.ndarray, got: np.ndarray) -> bool:
    """Up to flipped codes and biases rounded to int32; a lost transform or clip is 8 % to 98 % off."""
    return float(np.abs(expected - got).max()) <= 0.04 * float(np.abs(expected).max())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("w, a, scheme", PAIRS)
def test_D4_every_quantizer_exports_what_it_computes(w, a, scheme, bits, tmp_path, monkeypatch):
    if a in ("dorefa", "pact"):  # their transform is in the graph
        export_once(monkeypatch, f"{a}-{scheme}")
    else:
        export_once(monkeypatch, "plain")
    qmodel = learned(w, a, scheme, bits)
    path = tmp_path / "m.onnx"
    report = qmodel.export_onnx(images()[0], str(path), input_names=["x"], batches=images())
    wrong = [c.name for c in report.certificate.quantizers.values() if c.wrong]
    assert report.ok and not wrong and report.certificate.at_boundary <= 2
    assert close(*both(qmodel, path, images()[2]))


def test_D5_a_4_bit_model_saturates_in_the_file_too(tmp_path, monkeypatch):
    """The original clipped to the 8-bit range: 2x scaled inputs gave another output."""
    export_once(monkeypatch, "plain")
    config = QuantConfig.load("w4a4").override("SCHEDULE.EQUALIZE", False, "SCHEDULE.BIAS_CORRECTION", False)
    qmodel = sparsebit.quantize(small_net(), images(), config)
    path = tmp_path / "m.onnx"
    qmodel.export_onnx(images()[0], str(path), input_names=["x"])
    for bigger in (2, 10):
        assert close(*both(qmodel, path, images()[1] * bigger))


def test_D26_D27_learned_zero_points_stay_codes(tmp_path, monkeypatch):
    """LSQ+ could not be exported at all; a zero point that training pushed out of the range still has a code."""
    export_once(monkeypatch, "plain")
    qmodel = learned("lsq+", "lsq+", AFFINE, 8)
    for name, quantizer in qmodel.named_quantizers():
        if name.endswith("input_quantizer"):
            quantizer.zero_point.data.fill_(-3.7 if "conv1" in name else 300.0)
    path = tmp_path / "m.onnx"
    assert qmodel.export_onnx(images()[0], str(path), input_names=["x"]).ok
    graph = onnx.load(path).graph
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    zeros = {int(arrays[n.input[2]]) for n in graph.node if n.op_type == "QuantizeLinear"}
    assert zeros == {0, 255}
    assert close(*both(qmodel, path, images()[2]))


def test_D27_exporting_leaves_learned_parameters_parameters(tmp_path, monkeypatch):
    export_once(monkeypatch, "plain")
    qmodel = learned("lsq+", "lsq+", AFFINE, 8)
    before = {name: p.clone() for name, p in qmodel.named_parameters()}
    qmodel.export_onnx(images()[0], str(tmp_path / "m.onnx"))
    after = dict(qmodel.named_parameters())
    assert list(after) == list(before) and all(torch.equal(after[k], v) for k, v in before.items())
    qmodel(images()[0]).sum().backward()  # and they still learn
    grads = [p.grad for name, p in after.items() if name.endswith(("zero_point", "scale"))]
    assert grads and any(g is not None and bool(g.abs().sum() > 0) for g in grads)


def test_D25_bits_are_placed_by_name(tmp_path, monkeypatch):
    """The original aligned bits with nodes by position, and failed or mixed them up."""
    export_once(monkeypatch, "plain")
    config = {
        "BACKEND": "onnxruntime",
        "SCHEDULE": {"FUSE_BN": True, "WHOLLY_FLOAT": False},
        "W": {"SPECIFIC": [{"layer1.0.conv1": ["QUANTIZER.BIT", 4]}, {"fc": ["QUANTIZER.BIT", 6]}]},
        "A": {"SPECIFIC": [{"layer1.0.conv2": ["QUANTIZER.BIT", 5]}]},
    }
    qmodel = QuantModel(small_net(), QuantConfig.load(config)).calibrate(images())
    path = tmp_path / "m.onnx"
    qmodel.export_onnx(images()[0], str(path), extra_info=True)
    wanted = {name: q.bit for name, q in qmodel.named_quantizers()}
    assert {4, 5, 6, 8} == set(wanted.values())
    extra = onnx.load(tmp_path / "m_extra.onnx")
    seen = {}
    for node in extra.graph.node:
        bits = [a.i for a in node.attribute if a.name == "bits"]
        if bits:
            name = node.name.rpartition("/")[0].partition("#")[0]
            assert seen.setdefault(name, bits[0]) == bits[0] == wanted[name]
    assert (
        seen == {name: wanted[name] for name in seen} and len(seen) >= len(wanted) - 2
    )  # equal ones are merged
    assert not any(a.name == "bits" for node in onnx.load(path).graph.node for a in node.attribute)
    (tmp_path / "m_extra.onnx").unlink()
    qmodel.add_extra_info_to_onnx(str(path))
    assert (tmp_path / "m_extra.onnx").exists()


def test_half_precision_models(tmp_path):
    """Grids are float32; the file computes them there, as the model does."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).half().eval()
    g = torch.Generator().manual_seed(0)
    data = [torch.randn(4, 8, generator=g).half() for _ in range(3)]
    qmodel = sparsebit.quantize(net, data)
    report = qmodel.export_onnx(data[0], str(tmp_path / "m.onnx"))
    assert report.ok and sum(c.wrong for c in report.certificate.quantizers.values()) == 0


def test_a_layer_called_twice_keeps_both_places(tmp_path):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(torch.tanh(self.fc(x)) * 3)

    torch.manual_seed(0)
    for per_call in (False, True):
        config = QuantConfig.load("w8a8").override("A.PER_CALL", per_call)
        qmodel = sparsebit.quantize(Twice().eval(), [torch.randn(16, 8) for _ in range(3)], config)
        report = qmodel.export_onnx(torch.randn(16, 8), str(tmp_path / "m.onnx"))
        assert report.ok and sum(c.wrong for c in report.certificate.quantizers.values()) == 0
        codes = [
            t
            for t in onnx.load(tmp_path / "m.onnx").graph.initializer
            if t.name.endswith("weight_quantizer/codes")
        ]
        assert len(codes) == 1  # one weight, however often it is used
