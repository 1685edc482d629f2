"""Batch-norm tuning: it repairs what rounding moved, folding keeps the tuned output, nothing is left behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sparsebit
from models import images, randomise, small_net, sqnr
from sparsebit.errors import CalibrationError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.calibration.batchnorm_tuning import _listening, _Tuned, batchnorm_tuning
from sparsebit.quantization.quantizers import Mode, Quantizer

X = images(6, batch=16, seed=3)
W4A4 = {
    "BACKEND": "virtual",
    "SCHEDULE": {"BN_TUNING": True},
    "W": {"QUANTIZER": {"BIT": 4}},
    "A": {"QUANTIZER": {"BIT": 4}},
}


def calibrated(net, config=W4A4, batches=X):
    qmodel = QuantModel(net, config).calibrate(batches, progress=False)
    qmodel.set_quant(w_quant=True, a_quant=True)
    return qmodel


def tune(qmodel, batches=X):
    with torch.no_grad(), batchnorm_tuning(qmodel):
        for x in batches:
            qmodel(x)
    return qmodel


def norms(model):
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


@pytest.mark.parametrize("bias", [False, True])
def test_D1_tuning_runs_helps_and_folds_also_with_bias(bias):
    net = small_net(bias=bias)
    bright = [x + 2 for x in X]  # a mean for the errors of the weights to act on
    test = [x + 2 for x in images(2, batch=32, seed=9)]
    qmodel = calibrated(net, {**W4A4, "A": {}}, bright)
    real = torch.cat([net(x) for x in test])
    before = sqnr(real, torch.cat([qmodel(x) for x in test]))
    tune(qmodel, bright)
    after = sqnr(real, torch.cat([qmodel(x) for x in test]))
    assert after > before + 1
    assert not norms(qmodel.model) and qmodel.model.layer1_0_conv2.bias is not None


def test_statistics_move_by_what_quantization_changed():
    """One convolution and one norm: the new mean and variance can be computed by hand."""
    torch.manual_seed(0)
    net = randomise(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    qmodel = calibrated(net)
    conv, bn = (getattr(qmodel.model, name) for name in ("_0", "_1"))
    old_mean, old_var = bn.running_mean.clone(), bn.running_var.clone()
    tuned = [_Tuned(bn)]
    with torch.no_grad(), _listening(qmodel.model, tuned):
        for x in X:
            qmodel(x)
    with torch.no_grad():
        quantized = [conv(x) for x in X]
        qmodel.set_quant(False, False)
        real = [conv(x) for x in X]
    mean = lambda outs: torch.stack([o.mean((0, 2, 3)) for o in outs]).mean(0)
    var = lambda outs: torch.stack([o.var((0, 2, 3), unbiased=False) for o in outs]).mean(0)
    torch.testing.assert_close(bn.running_mean, old_mean + mean(quantized) - mean(real))
    ratio = (var(quantized) + bn.eps) / (var(real) + bn.eps)
    torch.testing.assert_close(bn.running_var, (old_var + bn.eps) * ratio - bn.eps)


def test_a_network_that_loses_nothing_is_not_changed():
    """16 bits: the norms already fit, whatever images tune them."""
    bits = {"QUANTIZER": {"BIT": 16}}
    net = small_net()
    qmodel = calibrated(net, {"BACKEND": "virtual", "SCHEDULE": {"BN_TUNING": True}, "W": bits, "A": bits})
    tune(qmodel, [x.abs() / 2 for x in X])  # not at all what the norms were made for
    assert sqnr(net(X[0]), qmodel(X[0])) > 60


def test_folding_keeps_the_output_of_the_tuned_network():
    net = small_net(channels=16)
    with torch.no_grad():
        net.bn1.weight[:3] *= -1  # mirrored filters
    preset = sparsebit.QuantConfig.load("w8a8").override("SCHEDULE.BN_TUNING", True)  # with bias correction
    qmodel = calibrated(net, preset)
    kept = {}
    with torch.no_grad(), batchnorm_tuning(qmodel):
        for x in X:
            qmodel(x)
        kept["unfolded"] = copy.deepcopy(qmodel.model)
    unfolded = kept["unfolded"]
    for module in unfolded.modules():
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()
    assert norms(unfolded) and not norms(qmodel.model)
    with torch.no_grad():
        assert sqnr(unfolded(X[0]), qmodel(X[0])) > 35  # 8 bits: a code that flips costs more than that
    scale, bn = unfolded.layer1_0_conv1.weight_quantizer.scale, unfolded.layer1_0_bn1
    factor = bn.weight.detach() / (bn.running_var + bn.eps).sqrt()
    torch.testing.assert_close(qmodel.model.layer1_0_conv1.weight_quantizer.scale, scale * factor)


def test_codes_of_the_weights_stay_the_same():
    qmodel = calibrated(small_net())
    conv = qmodel.model.conv1
    codes = lambda: (conv.weight / conv.weight_quantizer.scale.view(-1, 1, 1, 1)).round().clamp(-8, 7)
    before = codes()
    tune(qmodel)
    assert torch.equal(codes(), before)


def test_modes_flags_and_hooks_come_back():
    qmodel = calibrated(small_net())
    qmodel.set_quant(w_quant=True, a_quant=False)
    qmodel.train()
    with batchnorm_tuning(qmodel):
        assert not any(m.training for m in qmodel.modules())
        active = [m for m in qmodel.modules() if isinstance(m, Quantizer) and not m.absorbed]
        assert all(m.mode is Mode.QUANT for m in active)
        qmodel(X[0])
    assert qmodel.model.conv1.weight_quantizer.use_quant and not qmodel.model.conv1.input_quantizer.use_quant
    assert all(m.training for m in qmodel.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in qmodel.modules())


def test_an_error_inside_the_block_changes_nothing():
    qmodel = calibrated(small_net())
    qmodel.train()
    before = {name: value.clone() for name, value in qmodel.state_dict().items()}
    with pytest.raises(ZeroDivisionError), batchnorm_tuning(qmodel):
        qmodel(X[0])
        raise ZeroDivisionError
    after = qmodel.state_dict()
    assert set(after) == set(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert all(m.training for m in qmodel.modules())
    assert not any(m._forward_pre_hooks for m in qmodel.modules())


@pytest.mark.parametrize(
    ("config", "run", "message"),
    [
        (W4A4, False, "no batch was run"),
        ({"BACKEND": "virtual", "SCHEDULE": {"FUSE_BN": True}}, True, "SCHEDULE.BN_TUNING: true"),
    ],
)
def test_what_cannot_work_says_so(config, run, message):
    qmodel = calibrated(small_net(), config)
    with pytest.raises(CalibrationError, match=message), batchnorm_tuning(qmodel):
        if run:
            qmodel(X[0])


def test_it_needs_a_calibrated_model():
    qmodel = QuantModel(small_net(), W4A4)
    with pytest.raises(CalibrationError, match="no scale yet"), batchnorm_tuning(qmodel):
        pass
    assert norms(qmodel.model)


def test_a_norm_that_nothing_absorbs_stays_tuned(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8)

        def forward(self, x):
            return self.last(torch.relu(self.norm(self.conv(x))))

    torch.manual_seed(0)
    qmodel = calibrated(randomise(Net()))
    (old,) = [m.running_mean.clone() for n, m in qmodel.model.named_modules() if n == "last"]
    tune(qmodel)
    assert [type(m).__name__ for m in norms(qmodel.model)] == ["QBatchNorm2d"]
    assert not torch.equal(qmodel.model.last.running_mean, old) and not qmodel.model.last.training


def test_a_tuned_model_can_be_saved(tmp_path):
    net = small_net(bias=True)
    config = sparsebit.QuantConfig.load("w8a8").override("SCHEDULE.BN_TUNING", True, "W.QUANTIZER.BIT", 4)
    qmodel = tune(calibrated(net, config))
    qmodel.save(tmp_path)
    again = QuantModel.load(tmp_path, net)
    torch.testing.assert_close(again(X[0]), qmodel(X[0]))
