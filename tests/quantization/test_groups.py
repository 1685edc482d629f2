"""W.GROUP: several scales per channel of a Linear weight, from the config to the file."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from sparsebit import QuantModel
from sparsebit.errors import ConfigError, ExportError
from sparsebit.numeric import QParams, QuantSpec, dequantize, fake_quantize, quantize_to_int

GROUP = 8


def net(inputs: int = 32) -> nn.Module:
    torch.manual_seed(0)
    layers = {"first": nn.Linear(inputs, 24), "relu": nn.ReLU(), "last": nn.Linear(24, 16, bias=False)}
    return nn.Sequential(OrderedDict(layers)).eval()


def build(group: int | None, bits: int = 4, w: dict | None = None, **options) -> QuantModel:
    w = {"GROUP": group, "QUANTIZER": {"BIT": bits}, **(w or {})}
    config = {"BACKEND": "onnxruntime", "W": w, **options}
    return QuantModel(net(), config).calibrate([torch.randn(6, 32) for _ in range(2)])


def by_hand(weight: torch.Tensor, bits: int, symmetric: bool) -> torch.Tensor:
    """Plain loops over channels and groups, in numpy."""
    w, out = weight.numpy(), np.empty_like(weight.numpy())
    levels = 2**bits - 1
    for row, result in zip(w, out):
        for start in range(0, len(row), GROUP):
            part = row[start : start + GROUP]
            if symmetric:
                scale, zero = np.abs(part).max() / np.float32(levels / 2), 0
                low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
            else:
                scale = (max(part.max(), 0) - min(part.min(), 0)) / levels
                zero, low, high = np.rint(-min(part.min(), 0) / scale), 0, levels
            codes = np.clip(np.rint(part / scale) + zero, low, high)
            result[start : start + GROUP] = (codes - zero) * scale
    return torch.from_numpy(out)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["symmetric", "affine"])
def test_weights_are_rounded_group_by_group(bits, kind):
    qmodel = build(GROUP, bits, {"QSCHEME": f"per-channel-{kind}"})
    qmodel.set_quant(w_quant=True)
    for layer in (qmodel.model.first, qmodel.model.last):
        assert layer.weight_quantizer.scale.shape == (layer.weight.numel() // GROUP,)
        expected = by_hand(layer.weight.detach(), bits, kind == "symmetric")
        torch.testing.assert_close(layer.quantized_weight().detach(), expected, rtol=1e-5, atol=1e-6)


def test_codes_and_gradients():
    spec = QuantSpec(4, True, 0, group=4)
    x = torch.randn(6, 8, requires_grad=True)
    scale = (torch.rand(12) * 0.2 + 0.1).requires_grad_()
    qparams = QParams(scale, torch.zeros(12))
    y = fake_quantize(x, qparams, spec)
    torch.testing.assert_close(dequantize(quantize_to_int(x, qparams, spec), qparams, spec), y)
    y.sum().backward()
    assert x.grad.shape == x.shape and scale.grad.shape == (12,)
    # a group only feels its own scale
    alone = fake_quantize(x[2:3, 4:8].detach(), QParams(scale[5:6], torch.zeros(1)), QuantSpec(4))
    torch.testing.assert_close(alone, y[2:3, 4:8])


def test_groups_are_finer_than_channels():
    """Weights whose size changes along a row, as after outliers: a scale per group follows them."""
    layer = nn.Linear(32, 16)
    layer.weight.data.mul_(torch.logspace(0, 1.5, 32))
    errors = []
    for group in (None, GROUP, 4):
        qmodel = QuantModel(
            nn.Sequential(layer), {"BACKEND": "virtual", "W": {"GROUP": group, "QUANTIZER": {"BIT": 4}}}
        )
        qmodel.calibrate([torch.randn(6, 32)]).set_quant(w_quant=True)
        rounded = next(iter(qmodel.model.children())).quantized_weight()
        errors.append(float((rounded - layer.weight).detach().square().mean()))
    assert errors[0] > 2 * errors[1] > 2 * errors[2]


def test_group_as_large_as_the_channel_is_per_channel():
    layer = build(32).model.first
    assert layer.weight_quantizer.spec.group is None and layer.weight_quantizer.scale.shape == (24,)


def test_override_per_layer_and_repr():
    qmodel = build(GROUP, 4, {"SPECIFIC": [{"last": ["GROUP", None]}]})
    first, last = (qmodel.model.get_submodule(n).weight_quantizer for n in ("first", "last"))
    assert "in groups of 8" in repr(first) and last.spec.group is None
    assert "per-group(8)" in str(qmodel.preflight())


@pytest.mark.parametrize(
    "group, scheme, message",
    [
        (
            7,
            "per-channel-symmetric",
            r"first: W\.GROUP: 32 inputs cannot be split into groups of 7.*SPECIFIC",
        ),
        (8, "per-tensor-symmetric", r"W\.GROUP: .*per-channel-symmetric"),
        (0, "per-channel-symmetric", r"W\.GROUP"),
    ],
)
def test_bad_groups_are_refused(group, scheme, message):
    with pytest.raises(ConfigError, match=message):
        QuantModel(net(), {"BACKEND": "virtual", "W": {"GROUP": group, "QSCHEME": scheme}})


@pytest.mark.parametrize("quantizer", ["lsq", "lsq+", "dorefa", "uniform"])
def test_save_load_and_training(tmp_path, quantizer):
    qmodel = build(GROUP, 4, {"QUANTIZER": {"TYPE": quantizer, "BIT": 4}})
    qmodel.set_quant(True, True)
    x = torch.randn(5, 32)
    qmodel(x).square().sum().backward()
    weight = qmodel.model.first.weight
    assert weight.grad is not None and bool(weight.grad.isfinite().all())
    qmodel.save(tmp_path / "m")
    again = QuantModel.load(tmp_path / "m", net())
    again.set_quant(True, True)
    torch.testing.assert_close(again(x), qmodel(x), rtol=0, atol=0)


@pytest.mark.parametrize("bits, opset", [(2, 25), (3, 21), (4, 21), (5, 21), (6, 21), (7, 21), (8, 21)])
@pytest.mark.parametrize("kind", ["symmetric", "affine"])
@pytest.mark.parametrize("weight_only", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_exports_with_the_models_codes(tmp_path, bits, opset, kind, weight_only, tokens):
    pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
    off = {"A": {"QUANTIZER": {"DISABLE": True}}} if weight_only else {}
    qmodel = build(
        GROUP * 2, bits, {"QSCHEME": f"per-channel-{kind}", "SPECIFIC": [{"last": ["GROUP", 8]}]}, **off
    )
    report = qmodel.export_onnx(
        torch.randn(2, 3, 32) if tokens else torch.randn(4, 32), str(tmp_path / "m.onnx")
    )
    assert report.ok and report.opset == opset
    assert sum(check.wrong for check in report.certificate.quantizers.values()) == 0
    assert report.certificate.runtime.noise_db < -35  # MatMulNBits rounds activations to 8 bits
    import onnx

    blocks = {
        n.name: {a.name: a.i for a in n.attribute}
        for n in onnx.load(tmp_path / "m.onnx").graph.node
        if n.op_type == "DequantizeLinear" and "weight" in n.name
    }
    assert [found["block_size"] for found in blocks.values()] == [16, 8]
    if weight_only and bits == 4 and tokens:
        assert report.integer["MatMulNBits"] >= 1


def test_tensorrt_takes_int4_in_groups_of_64_or_128(tmp_path):
    pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
    layer = nn.Sequential(nn.Linear(128, 8)).eval()

    def export(**w):
        config = {
            "BACKEND": "tensorrt",
            "W": {"QUANTIZER": {"BIT": 4}, **w},
            "A": {"QUANTIZER": {"DISABLE": True}},
        }
        config["A"]["QSCHEME"] = "per-tensor-symmetric"
        qmodel = QuantModel(layer, config).calibrate([torch.randn(4, 128)])
        return qmodel.export_onnx(torch.randn(4, 128), str(tmp_path / "m.onnx"))

    assert export(GROUP=64).ok
    with pytest.raises(ExportError, match="groups of 64 or 128"):
        export()
    with pytest.raises(ExportError, match="no groups of 32 4-bit weights"):
        export(GROUP=32)
