"""AdaRound and reconstruction: units on the graph, learned rounding, resume, reload, export."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
import sparsebit
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.quantizers.adaround import LinearTempDecay, SoftRounding, reconstruct_qlayer
from sparsebit.quantization.reconstruction import unit_learning
from sparsebit.quantization.reconstruction.reconstruct import learns_rounding
from sparsebit.quantization.reconstruction.units import find_units

STEPS = 150


def small_net():
    return models.small_net(blocks=1)


def images(n=4, size=8, seed=1, batch=8):
    """Smooth images: where neighbours are alike, the errors of weights add up, and the nearest is not the best."""
    coarse = models.images(n, batch, size // 4, seed)
    return [F.interpolate(x, scale_factor=4, mode="bilinear") + 0.5 for x in coarse]


def config(*overrides, preset="w4a8", steps=STEPS):
    chosen = ("W.QUANTIZER.TYPE", "adaround", "W.QUANTIZER.BIT", 3, "W.QUANTIZER.ADAROUND.STEPS", steps)
    return sparsebit.QuantConfig.load(preset).override(*chosen, *overrides)


def calibrated(net, cfg=None, batches=None):
    """A model with scales, not reconstructed: what `uniform` would give."""
    batches = batches or images()
    cfg = cfg or config()
    plain = QuantModel(net, cfg.override("W.QUANTIZER.TYPE", "uniform"), example=batches[0]).calibrate(
        batches
    )
    qmodel = QuantModel(net, cfg, example=batches[0])
    qmodel.load_state_dict(plain.state_dict(), strict=False)
    return qmodel.eval()


def error(net, qmodel, batches=None):
    """Squared error of the output."""
    qmodel.set_quant(True, True)
    with torch.no_grad():
        return sum(F.mse_loss(qmodel(x), net(x)).item() for x in batches or images())


def learned(qmodel):
    return [m for m in qmodel.model.modules() if learns_rounding(m)]


def names_of(net, kind="block", **options):
    qmodel = QuantModel(net, config(), **options)
    return [unit.name for unit in find_units(qmodel.model, learns_rounding, kind)], qmodel


# -- units -------------------------------------------------------------------------------------------------
def test_residual_blocks_are_units():
    names, qmodel = names_of(small_net())
    assert names == ["conv1", "layer1.0.conv1 .. layer1.0.conv2", "fc"]
    units = find_units(qmodel.model, learns_rounding)
    assert [n.name for n in units[1].inputs] == ["relu"] and len(units[1].outputs) == 1
    assert units[1].nodes[-1] is units[1].outputs[0]  # the activation behind the sum belongs to the block


def test_every_layer_is_a_unit_of_its_own():
    names, _ = names_of(small_net(), "layer")
    assert names == ["conv1", "layer1.0.conv1", "layer1.0.conv2", "fc"]


def test_a_plain_row_is_taken_in_threes():
    net = nn.Sequential(*[m for _ in range(7) for m in (nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())])
    assert names_of(net)[0] == ["0 .. 4", "6 .. 10", "12"]


class Dense(nn.Module):
    """Everything is read again at the end: there is nowhere to cut."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(10))

    def forward(self, x):
        values = [x]
        for conv in self.convs:
            values.append(conv(values[-1]).relu())
        return torch.cat(values, 1)


def test_a_stretch_without_cuts_is_divided_and_learned():
    net = Dense().eval()
    names, qmodel = names_of(net)
    assert names == ["convs.0", "convs.1 .. convs.3", "convs.4 .. convs.6", "convs.7 .. convs.9"]
    assert len(find_units(qmodel.model, learns_rounding)[1].outputs) == 3
    plain = calibrated(net)
    before = error(net, plain)
    qmodel.reconstruct(images())
    assert error(net, qmodel) < before


def test_a_shared_layer_is_learned_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            x = self.conv(self.conv(x).relu()).relu()
            return self.conv(self.head(x).relu()) + x

    _, qmodel = names_of(Twice().eval())
    layers = [m for unit in find_units(qmodel.model, learns_rounding, "layer") for m in unit.layers]
    assert len(layers) == 2 == len(set(layers))


# -- learning ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("unit", ["block", "layer"])
@pytest.mark.parametrize("asym", [True, False])
def test_learned_rounding_beats_the_nearest(unit, asym):
    net, cfg = small_net(), config("W.QUANTIZER.ADAROUND.UNIT", unit)
    qmodel = calibrated(net, cfg)
    before = error(net, qmodel)
    errors = qmodel.reconstruct(images(), asym=asym)
    assert error(net, qmodel) < before
    assert sum(after for _, after in errors.values()) < 0.85 * sum(b for b, _ in errors.values())
    assert len(errors) == (3 if unit == "block" else 4) and all(after <= b for b, after in errors.values())


def test_weights_are_on_the_grid_and_next_to_their_float_values():
    qmodel = calibrated(small_net())
    qmodel.reconstruct(images())
    moved = 0
    for m in learned(qmodel):
        quantizer = m.weight_quantizer
        quantizer.enable_quant()
        scale = quantizer.scale.view(-1, *[1] * (m.weight.dim() - 1))
        codes = m.quantized_weight() / scale
        torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-5)
        codes = codes.round()
        assert codes.min() >= quantizer.spec.qmin and codes.max() <= quantizer.spec.qmax
        distance = codes - (m.weight / scale).clamp(quantizer.spec.qmin, quantizer.spec.qmax)
        assert distance.abs().max() < 1.35  # a step of the old grid, which may have changed a little
        moved += (codes != (m.weight / scale).round().clamp(quantizer.spec.qmin, quantizer.spec.qmax)).sum()
    assert moved > 20


def test_the_float_model_comes_back():
    net, x = small_net(), images()[0]
    qmodel = QuantModel(net, config("SCHEDULE.EQUALIZE", False))
    with torch.no_grad():
        want = qmodel(x)
        qmodel.reconstruct(images())
        assert torch.equal(qmodel(x), want)
        qmodel.set_quant(True, True)
        assert not torch.equal(qmodel(x), want)
        qmodel.set_quant(False, False)
        assert torch.equal(qmodel(x), want)
    assert all(p.requires_grad for p in qmodel.parameters())
    assert not any(b.requires_grad for b in qmodel.buffers())


def test_low_bit_activations_learn_their_scales():
    net, x = small_net(), images()
    cfg = config("A.QUANTIZER.BIT", 3)
    plain = calibrated(net, cfg)
    before = error(net, plain, x)
    scales = [m.input_quantizer.scale.clone() for m in learned(plain)]
    plain.reconstruct(images())
    assert error(net, plain, x) < before
    assert any(not torch.equal(m.input_quantizer.scale, s) for m, s in zip(learned(plain), scales))


class TwoInputs(nn.Module):
    """A unit with two inputs, one of them per batch and of no batch size."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.table = nn.Parameter(torch.randn(6))

    def forward(self, x, y):
        return self.c((self.a(x) * self.b(y) + self.table).relu())


def test_units_with_several_inputs():
    torch.manual_seed(0)
    net = TwoInputs().eval()
    pairs = [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(4)]
    qmodel = QuantModel(net, config(preset="w4"), example=pairs[0])
    plain = QuantModel(net, config(preset="w4").override("W.QUANTIZER.TYPE", "uniform"), example=pairs[0])
    plain.calibrate(pairs)
    qmodel.reconstruct(pairs)
    unit = find_units(qmodel.model, learns_rounding)[0]
    assert {n.name for n in unit.inputs} >= {"x", "y"} and len(unit.layers) == 3

    def off(model):
        model.set_quant(True, True)
        return sum(F.mse_loss(model(*p), net(*p)).item() for p in pairs)

    with torch.no_grad():
        assert off(qmodel) < off(plain)


def test_batches_of_other_shapes_are_drawn_whole():
    net = small_net()
    mixed = [*images(2), *images(2, size=16), *images(1, batch=3)]
    qmodel = calibrated(net, batches=mixed)
    before = error(net, qmodel)
    qmodel.reconstruct(mixed)
    assert error(net, qmodel) < before


def test_what_is_worse_than_plain_rounding_is_not_kept(monkeypatch):
    net = small_net()
    qmodel = calibrated(net, config("W.QUANTIZER.ADAROUND.STEPS", 1))
    state = copy.deepcopy(qmodel.state_dict())
    monkeypatch.setattr(unit_learning, "BIAS_LR", 100.0)  # the first step already ruins everything
    errors = qmodel.reconstruct(images())
    assert all(before == after for before, after in errors.values())
    assert all(torch.equal(v, state[k]) for k, v in qmodel.state_dict().items())


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offloading_learns_too(offload):
    net = small_net()
    qmodel = calibrated(net)
    before = error(net, qmodel)
    qmodel.reconstruct(images(), offload=offload)
    assert error(net, qmodel) < before


def test_old_scripts_and_one_call_reconstruct():
    net = small_net()
    qmodel = QuantModel(net, config())
    qmodel.prepare_calibration()
    for x in images():
        qmodel(x)
    qmodel.calc_qparams(asym=True, w_quant=True, a_quant=True)
    assert any(m.weight_quantizer.reconstructed for m in learned(qmodel))
    qmodel.prepare_calibration()  # a new calibration starts from nothing
    qmodel(images()[0])
    with pytest.raises(CalibrationError):
        qmodel.calc_qparams(), qmodel.calc_qparams()
    one = sparsebit.quantize(net, images(), config())
    assert any(m.weight_quantizer.reconstructed for m in learned(one))
    with pytest.raises(ConfigError, match=r"W\.QUANTIZER\.TYPE: adaround"):
        QuantModel(net).reconstruct(images())


def test_a_new_width_forgets_what_was_learned():
    qmodel = sparsebit.quantize(small_net(), images(), config())
    quantizer = next(m.weight_quantizer for m in learned(qmodel) if m.weight_quantizer.reconstructed)
    quantizer.set_bit(8)
    assert not quantizer.reconstructed


def test_one_layer_by_the_old_function():
    net = small_net()
    qmodel = calibrated(net)
    layer, x = qmodel.model.layer1_0_conv1, F.interpolate(torch.randn(64, 8, 2, 2), scale_factor=3).relu()
    with torch.no_grad():
        want = layer(x)
        layer.set_quant(True, False)
        before = F.mse_loss(layer(x), want).item()
    torch.manual_seed(0)
    reconstruct_qlayer(layer, x, want, batch_size=16, max_steps=150)
    layer.set_quant(True, False)
    with torch.no_grad():
        assert F.mse_loss(layer(x), want).item() < 0.9 * before


# -- the formulas ------------------------------------------------------------------------------------------
def test_soft_rounding_starts_at_the_weight_and_ends_on_the_grid():
    from sparsebit.numeric import QParams

    weight = torch.tensor([[0.24, -0.31, 0.05], [0.9, -0.77, 0.4]])
    scale = torch.tensor([0.1, 0.2])
    soft = SoftRounding(weight, QParams(scale, torch.zeros(2)), -4, 3, 0)
    torch.testing.assert_close(
        soft.weight(), weight.clamp(-4 * scale[:, None], 3 * scale[:, None]), rtol=0, atol=1e-4
    )
    assert soft.codes().tolist() == [[2.0, -3.0, 1.0], [3.0, -4.0, 2.0]]
    h = soft.up()
    naive = sum(1 - abs(2 * float(v) - 1) ** 4 for v in h.detach().flatten())
    assert soft.penalty(4).item() == pytest.approx(naive, rel=1e-5)
    soft.decide(0.5)
    assert int((soft.v.abs() == 10).sum()) == 3 and not soft.decided
    soft.decide(1.0)
    assert soft.decided and torch.equal(soft.up().round(), soft.up())


def test_beta_goes_down_in_a_straight_line():
    beta = LinearTempDecay(100, 0.2, 20, 2)
    assert [beta(t) for t in (0, 19, 20, 60, 100)] == [20, 20, 20, pytest.approx(11), pytest.approx(2)]


# -- files -------------------------------------------------------------------------------------------------
def test_save_load_and_state_dict_keep_every_bit(tmp_path):
    net, x = small_net(), images(seed=3)[0]
    qmodel = sparsebit.quantize(net, images(), config())
    qmodel.save(tmp_path)
    loaded = QuantModel.load(tmp_path, net)
    fresh = QuantModel(net, config())
    fresh.load_state_dict(qmodel.state_dict())
    fresh.set_quant(True, True)
    with torch.no_grad():
        want = qmodel(x)
        assert torch.equal(loaded(x), want) and torch.equal(fresh.eval()(x), want)


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    net = small_net()
    whole = calibrated(net)
    whole.reconstruct(images())
    learn, calls = unit_learning.learn, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return learn(*args)

    qmodel = calibrated(net)
    monkeypatch.setattr(unit_learning, "learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        qmodel.reconstruct(images(), checkpoint=tmp_path)
    assert all(m.weight_quantizer.soft is None for m in learned(qmodel))
    assert len(list(tmp_path.glob("unit*"))) == 1
    for again in (qmodel, calibrated(net)):  # the same process, or a new one
        calls[:] = [()] * 2
        again.reconstruct(images(), checkpoint=tmp_path)
        same = whole.state_dict()
        assert all(torch.equal(v, same[k]) for k, v in again.state_dict().items())
    assert len(calls) == 2  # the second time there was nothing left to learn
    with pytest.raises(CalibrationError, match="other calibration data"):
        calibrated(net).reconstruct(images(seed=5), checkpoint=tmp_path)


def test_exports_with_a_certificate(tmp_path):
    pytest.importorskip("onnxruntime")
    qmodel = sparsebit.quantize(small_net(), images(), config("W.QUANTIZER.BIT", 4))
    report = qmodel.export_onnx(images()[0], str(tmp_path / "net.onnx"))
    assert report.ok


def test_islands_are_reconstructed():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(12, 12)

        def forward(self, x):
            return self.fc(x) if x.sum() > 0 else self.fc(-x)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), Odd(), nn.Linear(12, 4)).eval()
    x = [torch.randn(8, 12) for _ in range(4)]
    qmodel = QuantModel(net, config(), example=x[0])
    qmodel.reconstruct(x)
    assert len(learned(qmodel)) == 3


def test_groups_of_a_linear_layer():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x = [torch.randn(16, 4).repeat(1, 8) + 0.1 * torch.randn(16, 32) for _ in range(4)]
    cfg = config("W.GROUP", 8)
    qmodel = calibrated(net, cfg, x)
    before = error(net, qmodel, x)
    qmodel.reconstruct(x)
    assert error(net, qmodel, x) < before
