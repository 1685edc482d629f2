"""The profile: figures against forwards made by hand, planted faults are found, and the named override repairs them."""

from __future__ import annotations

import json
import math

import pytest
import torch
import yaml
from torch import nn

import sparsebit
from models import Attention, images, small_net, sqnr
from sparsebit.errors import CalibrationError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.analysis.profile import profile
from sparsebit.quantization.quantizers import Mode, Quantizer

X = images(2)
W4A4 = {"BACKEND": "virtual", "W": {"QUANTIZER": {"BIT": 4}}, "A": {"QUANTIZER": {"BIT": 4}}}


def repaired(config, *rows):
    """The config with the overrides that the rows name."""
    config = sparsebit.QuantConfig.load(config)
    for row in rows:
        (key, rules), *rest = yaml.safe_load(row.fix).items()
        assert not rest
        letter = key.partition(".")[0]
        config = config.override(key, [*getattr(config, letter).specific, *rules])
    return config


@torch.no_grad()
def total(net, config, x):
    return sqnr(net(x), sparsebit.quantize(net, [x], config)(x))


@torch.no_grad()
def test_figures_are_those_of_plain_forwards():
    net = small_net()
    qmodel = sparsebit.quantize(net, X, W4A4)
    report = profile(qmodel, X)
    real = torch.cat([net(x) for x in X])
    assert report.total == pytest.approx(sqnr(real, torch.cat([qmodel(x) for x in X])), abs=0.01)
    rows = {row.name: row for row in report.rows}
    assert len(rows) == 7
    for name in ("conv1", "layer1_0_conv2", "pool", "fc"):
        layer = qmodel.model.get_submodule(name)
        outs = {}
        for mode in ("float", "quantized", "weight", "inputs"):
            qmodel.set_quant(False, False)
            layer.set_quant(mode in ("quantized", "weight"), mode in ("quantized", "inputs"))
            found = []
            handle = layer.register_forward_hook(lambda m, args, out, found=found: found.append(out.clone()))
            outs[mode] = (torch.cat([qmodel(x) for x in X]), torch.cat(found))
            handle.remove()
        compare = lambda mode, i: sqnr(outs["float"][i], outs[mode][i])
        assert rows[name].effect == pytest.approx(compare("quantized", 0), abs=0.01)
        assert rows[name].own == pytest.approx(compare("quantized", 1), abs=0.01)
        assert rows[name].inputs == pytest.approx(compare("inputs", 1), abs=0.01)
        if name != "pool":
            assert rows[name].weight == pytest.approx(compare("weight", 1), abs=0.01)
    assert rows["pool"].weight is None


def test_two_rankings():
    report = profile(sparsebit.quantize(small_net(), X, W4A4), X[0])
    assert [r.effect for r in report.rows] == sorted(r.effect for r in report.rows)
    assert [r.own for r in report.by_sqnr] == sorted(r.own for r in report.rows)
    assert [r.name for r in report.rows] != [r.name for r in report.by_sqnr]


def test_weights_that_are_too_coarse_get_more_bits():
    config = {"BACKEND": "virtual", "W": {"SPECIFIC": [{"layer1.0.conv1": ["QUANTIZER.BIT", 2]}]}}
    net = small_net()
    worst = profile(sparsebit.quantize(net, X, config), X).by_sqnr[0]
    assert worst.name == "layer1_0_conv1" and worst.weight < worst.inputs
    assert worst.fix.startswith('W.SPECIFIC: [{"layer1.0.conv1": ["QUANTIZER.BIT", ')
    assert total(net, repaired(config, worst), X[0]) > total(net, config, X[0]) + 6
    assert worst.fixed > worst.own + 6


class Outlier(nn.Module):
    """One huge value in the input of `fc2`, which min/max stretches the grid for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(32, 32), nn.Linear(32, 32)
        self.spike = nn.Parameter(torch.zeros(64, 32))
        with torch.no_grad():
            self.spike[0, 0] = 60
            self.fc2.weight[:, 0] = 0  # nobody needs it

    def forward(self, x):
        return self.fc2(self.fc1(x) + self.spike)


def test_a_range_that_outliers_stretch_gets_another_observer():
    config, net, x = {"BACKEND": "virtual", "A": {"QUANTIZER": {"BIT": 6}}}, Outlier(), torch.randn(64, 32)
    worst = profile(sparsebit.quantize(net, [x], config), x).rows[0]
    assert worst.name == "fc2" and worst.inputs < worst.weight
    assert worst.fix.startswith('A.SPECIFIC: [{"fc2": ["OBSERVER.TYPE", ')
    assert total(net, repaired(config, worst), x) > total(net, config, x) + 3


def test_weights_with_one_scale_get_one_per_channel():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with torch.no_grad():
        net[0].weight *= torch.logspace(-2, 1, 16)[:, None]
    config, x = (
        {"BACKEND": "virtual", "W": {"QSCHEME": "per-tensor-symmetric", "QUANTIZER": {"BIT": 4}}},
        torch.randn(64, 16),
    )
    with torch.no_grad():
        net[1].weight /= torch.logspace(-2, 1, 16)
    rows = {row.name: row for row in profile(sparsebit.quantize(net, [x], config), x).rows}
    assert '["QSCHEME", "per-channel-symmetric"]' in rows["_0"].fix + rows["_1"].fix


@pytest.mark.parametrize(
    ("backend", "override"), [("virtual", '"BIT", 16'), ("onnxruntime", '"DISABLE", true')]
)
def test_the_backend_decides_how_many_bits(backend, override):
    net, x = nn.Sequential(nn.Linear(8, 8, bias=False)), torch.rand(99, 8)  # no tails to cut
    report = profile(sparsebit.quantize(net, [x], {"BACKEND": backend}), x)
    assert report.rows[0].fix.replace("QUANTIZER.", "").endswith(f"[{override}]}}]")


@torch.no_grad()
def test_inputs_of_a_matmul_belong_to_it():
    net, x = Attention().eval(), torch.randn(4, 6, 16)
    config = {"BACKEND": "virtual", "A": {"SPECIFIC": [{"matmul_1_identity0": ["QUANTIZER.BIT", 2]}]}}
    qmodel = sparsebit.quantize(net, [x], config)
    report = profile(qmodel, x)
    worst = report.rows[0]
    assert worst.name == "matmul_1" and '"matmul_1_identity0"' in worst.fix
    assert not any("identity" in row.name for row in report.rows)
    qmodel.set_quant(False, False)
    for i in (0, 1):
        qmodel.model.get_submodule(f"matmul_1_identity{i}").set_quant(True, True)
    assert worst.effect == pytest.approx(sqnr(net(x), qmodel(x)), abs=0.01)
    assert total(net, repaired(config, worst), x) > total(net, config, x) + 6


class Stubborn(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.fc1(x)
        return self.fc2(x.relu_()) if x.sum() < 1e9 else x


def test_layers_inside_islands():
    x = torch.randn(32, 8)
    report = profile(sparsebit.quantize(nn.Sequential(nn.Linear(8, 8), Stubborn()), [x], W4A4), x)
    assert {row.path for row in report.rows} == {"0", "1.fc1", "1.fc2"}
    assert all(5 < row.own < 60 for row in report.rows)


def test_text_dict_and_repr():
    report = profile(sparsebit.quantize(small_net(), X, W4A4), X)
    assert repr(report) == str(report) and all(row.path in str(report) for row in report.rows)
    assert json.loads(json.dumps(report.as_dict()))["rows"][0]["name"] == report.rows[0].name
    harmless = [r for r in report.rows if r.effect > report.total + 20]
    assert harmless and not any(r.fix for r in harmless)


def test_everything_comes_back(monkeypatch):
    qmodel = sparsebit.quantize(small_net(), X, W4A4)
    qmodel.set_quant(w_quant=False, a_quant=True)
    qmodel.train()
    before = {name: value.clone() for name, value in qmodel.state_dict().items()}
    modes = [m.mode for m in qmodel.modules() if isinstance(m, Quantizer)]

    def same():
        assert [m.mode for m in qmodel.modules() if isinstance(m, Quantizer)] == modes
        assert all(m.training for m in qmodel.modules())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in qmodel.modules())
        assert all(torch.equal(v, before[n]) for n, v in qmodel.state_dict().items())

    profile(qmodel, X)
    same()
    with monkeypatch.context() as patch:
        patch.setattr(math, "log10", None)
        with pytest.raises(TypeError):
            profile(qmodel, X)
    same()


def test_what_cannot_work_says_so():
    with pytest.raises(CalibrationError, match="is empty"):
        profile(sparsebit.quantize(small_net(), X, W4A4), [])
    with pytest.raises(CalibrationError, match="no scale yet"):
        profile(QuantModel(small_net(), W4A4), X)


def test_suggested_overrides_were_never_tried_together():
    net = small_net()
    report = profile(sparsebit.quantize(net, X, W4A4), X)
    assert 1 <= len(report.suggested) <= 3 and report.together > report.total + 0.5
    rows = [row for row in report.rows if row.name in report.suggested]
    gained = total(net, repaired(W4A4, *rows), X[0]) - total(net, W4A4, X[0])
    assert gained > 0.4  # also when the model is really built with them
    assert all(row.fix in str(report) for row in rows) and f"-> {report.together:.1f} dB with:" in str(report)


def test_overrides_that_do_not_help_the_model_are_not_suggested(monkeypatch):
    from sparsebit.quantization.analysis import profile as module

    monkeypatch.setattr(module, "GAIN", 1000.0)
    report = profile(sparsebit.quantize(small_net(), X, W4A4), X)
    assert report.suggested == () and report.together is None
    assert "no override of a few layers helps the whole model" in str(report)


class Uneven(nn.Module):
    """Depthwise convolutions read channels whose ranges differ two hundred times."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.depthwise = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2)])
        self.pointwise = nn.ModuleList([nn.Conv2d(8, 8, 1) for _ in range(2)])
        self.register_buffer("sizes", torch.logspace(0, 2.3, 8).reshape(8, 1, 1))

    def forward(self, x):
        x = self.first(x)
        for depthwise, pointwise in zip(self.depthwise, self.pointwise):
            x = depthwise(torch.tanh(x) * self.sizes) / self.sizes
            x = pointwise(x)
        return x


def test_the_kind_of_quantizers_that_costs_most_is_named_with_its_repair():
    torch.manual_seed(0)
    net = Uneven().eval()
    config = {
        "BACKEND": "virtual",
        "W": {"QUANTIZER": {"BIT": 8}, "QSCHEME": "per-channel-symmetric"},
        "A": {"QUANTIZER": {"BIT": 6}, "QADD": {"ENABLE_QUANT": False}},
    }
    qmodel = sparsebit.quantize(net, X, config)
    report = profile(qmodel, X)
    assert report.group is not None
    assert report.group.what == "inputs of 2 x depthwise convolution, per tensor, 6 bits"
    for quantizer in (qmodel.model.depthwise_0, qmodel.model.depthwise_1):
        quantizer.input_quantizer.mode = Mode.FLOAT
    with torch.no_grad():
        outs = torch.cat([qmodel(x) for x in X])
        without = sqnr(torch.cat([net(x) for x in X]), outs)
    assert report.total + report.group.cost == pytest.approx(without, abs=0.01)
    mended = sparsebit.quantize(net, X, repaired(qmodel.cfg, report.group))
    with torch.no_grad():
        found = sqnr(torch.cat([net(x) for x in X]), torch.cat([mended(x) for x in X]))
    assert found == pytest.approx(report.group.fixed, abs=0.1) and found > report.total
    assert "costs most: inputs of 2 x depthwise" in str(report)
