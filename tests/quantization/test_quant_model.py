"""QuantModel and sparsebit.quantize, the way people use them."""

from __future__ import annotations

import logging
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparsebit
from models import SmallNet, images, small_net, sqnr
from sparsebit.errors import CalibrationError, ConfigError, GraphError, SparsebitError
from sparsebit.graph import graph_pass
from sparsebit.quantization import QuantModel
from sparsebit.quantization.modules import quant_mode


@pytest.fixture(scope="module")
def net():
    return small_net()


# -- batches -----------------------------------------------------------------------------------------
def test_every_form_of_batches_gives_the_same_scales(net):
    x = torch.cat(images())
    labels = torch.zeros(len(x), dtype=torch.long)
    forms = {
        "tensors": list(x.split(4)),
        "generator": (b for b in x.split(4)),
        "tuples": [(b,) for b in x.split(4)],
        "tuples with labels": [(b, 0) for b in x.split(4)],
        "dicts": [{"x": b} for b in x.split(4)],
        "DataLoader": DataLoader(TensorDataset(x, labels), batch_size=4),
        "one tensor": x,
    }
    want = None
    for form, batches in forms.items():
        qmodel = sparsebit.quantize(net, batches, {"BACKEND": "virtual"})
        got = {name: q.scale for name, q in qmodel.named_quantizers()}
        want = want or got
        assert all(torch.equal(want[k], v) for k, v in got.items()), form


def test_several_inputs_and_optional_ones():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, a, b, scale=1.0):
            return self.fc(a + b) * scale

    a, b = torch.randn(3, 4), torch.randn(3, 4)
    assert sparsebit.quantize(Two(), [(a, b)])(a, b).shape == (3, 2)
    assert sparsebit.quantize(Two(), [{"a": a, "b": b, "scale": 0.5}])(a, b, scale=0.5).shape == (3, 2)
    with pytest.raises(CalibrationError, match="expected tensors"):
        sparsebit.quantize(Two(), 3)


def test_calibration_streams_and_keeps_nothing(net):
    """Batches can be collected as soon as the forward is over."""
    import weakref

    alive = []

    def batches():
        for _ in range(4):
            x = torch.randn(4, 3, 12, 12)
            alive.append(weakref.ref(x))
            yield x

    qmodel = QuantModel(net, {"BACKEND": "virtual"})
    qmodel.prepare_calibration()
    with torch.no_grad():
        for x in batches():
            qmodel(x)
            del x
    assert not any(ref() is not None for ref in alive)
    qmodel.calc_qparams()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_name_the_tensor(net, bad):
    x = images()[0].clone()
    x[0, 0, 0, 0] = bad
    with pytest.raises(CalibrationError, match=r"conv1\.input_quantizer: .*NaN or Inf"):
        sparsebit.quantize(net, [x])


def test_an_interrupted_calibration_can_be_repeated(net):
    def broken():
        yield images()[0]
        raise KeyboardInterrupt

    qmodel = QuantModel(net, {"BACKEND": "virtual"})
    with pytest.raises(KeyboardInterrupt):
        qmodel.calibrate(broken())
    with pytest.raises(CalibrationError):
        qmodel.calc_qparams()
    x = images()[0]
    torch.testing.assert_close(qmodel(x), net(x), rtol=1e-4, atol=1e-5)
    want = dict(QuantModel(net, {"BACKEND": "virtual"}).calibrate(images()).named_quantizers())
    for name, q in qmodel.calibrate(images()).named_quantizers():
        assert torch.equal(q.scale, want[name].scale)


def test_recalibration_replaces_the_old_scales(net):
    qmodel = sparsebit.quantize(net, [100 * x for x in images()], {"BACKEND": "virtual"})
    qmodel.calibrate(images())
    fresh = dict(QuantModel(net, {"BACKEND": "virtual"}).calibrate(images()).named_quantizers())
    assert all(torch.equal(q.scale, fresh[name].scale) for name, q in qmodel.named_quantizers())


def test_a_quantizer_that_sees_no_float_data_is_switched_off(caplog):
    class Odd(nn.Module):
        def forward(self, x, index):
            return F.softmax(x, -1) + torch.add(index, index)

    cfg = {"BACKEND": "virtual", "A": {"QADD": {"ENABLE_QUANT": True}}}
    with caplog.at_level(logging.WARNING, "sparsebit"):
        qmodel = sparsebit.quantize(Odd(), [(torch.randn(3, 4), torch.ones(4, dtype=torch.long))], cfg)
    assert "add_identity0.input_quantizer saw no floating-point data" in caplog.text
    assert "add_identity0.input_quantizer" not in dict(qmodel.named_quantizers())


# -- switching ---------------------------------------------------------------------------------------
def test_float_mode_is_the_float_model(net):
    x = images()[0]
    qmodel = sparsebit.quantize(net, images())
    assert not torch.equal(qmodel(x), net(x))
    qmodel.set_quant(False, False)
    torch.testing.assert_close(qmodel(x), net(x), rtol=1e-4, atol=1e-5)


def test_quant_mode_restores_on_error(net):
    qmodel = sparsebit.quantize(net, images())
    qmodel.set_quant(w_quant=True, a_quant=False)
    before = [q.mode for _, q in qmodel.named_quantizers()]
    with pytest.raises(ZeroDivisionError), quant_mode(qmodel, w=False, a=True):
        assert [q.mode for _, q in qmodel.named_quantizers()] != before
        raise ZeroDivisionError
    assert [q.mode for _, q in qmodel.named_quantizers()] == before


def test_weights_only_and_activations_only_add_up(net):
    x = images()[0]
    qmodel = sparsebit.quantize(net, images(), "w4a4")
    noise = {}
    with torch.no_grad():
        for w, a in ((True, False), (False, True), (True, True)):
            qmodel.set_quant(w, a)
            noise[w, a] = sqnr(net(x), qmodel(x))
    assert noise[True, True] < min(noise[True, False], noise[False, True]) + 1


def test_set_bit_after_calibration_keeps_the_range(net):
    qmodel = sparsebit.quantize(net, images(), {"BACKEND": "virtual"})
    q = qmodel.model.fc.input_quantizer
    before = q.scale * 255
    q.set_bit(4)
    torch.testing.assert_close(q.scale * 15, before)


def test_reused_memory_is_invisible(net):
    """The same output with every in-place write forbidden; hooks see what the layer returned; inputs survive."""
    x = images()[0]
    keep = x.clone()
    qmodel = sparsebit.quantize(net, images())
    with torch.no_grad():
        want = qmodel(x)
        assert torch.equal(x, keep) and torch.equal(qmodel(x), want)
        assert any(q.reuse for _, q in qmodel.named_quantizers())
        seen = {}
        for name in ("conv1", "relu", "layer1_0_conv1"):
            getattr(qmodel.model, name).register_forward_hook(lambda m, i, o, n=name: seen.update({n: o}))
        assert torch.equal(qmodel(x), want)
        assert torch.equal(seen["relu"], seen["conv1"].relu())  # float values, not the quantized ones
        for _, q in qmodel.named_quantizers():
            q.reuse = None
        for module in qmodel.model.modules():
            if hasattr(module, "reuse"):
                module.reuse = None
        assert torch.equal(qmodel(x), want)
    assert torch.equal(qmodel(x).detach(), want)  # with grad enabled


def test_gradients_reach_the_weights(net):
    qmodel = sparsebit.quantize(net, images())
    qmodel.train()
    qmodel(images()[0]).square().sum().backward()
    assert qmodel.model.conv1.weight.grad.abs().sum() > 0


# -- config ------------------------------------------------------------------------------------------
def test_specific_by_fx_name_and_by_path_later_wins(net, caplog):
    cfg = {
        "BACKEND": "virtual",
        "W": {
            "SPECIFIC": [
                {"*": ["QUANTIZER.BIT", 6]},
                {"layer1.0.*": ["QUANTIZER.BIT", 4], "fc": ["QUANTIZER.BIT", 5]},
            ]
        },
        "A": {
            "SPECIFIC": [{"layer1_1_conv1": ["QUANTIZER.DISABLE", True], "nothing*": ["QUANTIZER.BIT", 3]}]
        },
    }
    with caplog.at_level(logging.WARNING, "sparsebit"):
        qmodel = QuantModel(net, cfg)
    bits = {
        n: m.weight_quantizer.bit
        for n, m in qmodel.model.named_children()
        if getattr(m, "weight_quantizer", None)
    }
    assert (
        bits["layer1_0_conv1"] == bits["layer1_0_conv2"] == 4
        and bits["fc"] == 5
        and bits["layer1_1_conv1"] == 6
    )
    assert qmodel.model.layer1_1_conv1.input_quantizer.absorbed
    assert "A.SPECIFIC: 'nothing*' matches no layer" in caplog.text and "'fc'" not in caplog.text


def test_skipped_modules_stay_float_and_whole(net):
    qmodel = QuantModel(net, {"BACKEND": "virtual", "SKIP_TRACE_MODULES": ["layer1.*"]})
    assert any("layer1.0 (Block)" in op for op in qmodel.float_ops.values())
    x = images()[0]
    torch.testing.assert_close(qmodel(x), net(x))


def test_bad_config_is_refused_before_work_starts(net):
    with pytest.raises(ConfigError, match=r"W.QUANTIZER.BITS: unknown option; did you mean BIT\?"):
        QuantModel(net, {"BACKEND": "virtual", "W": {"QUANTIZER": {"BITS": 8}}})


def test_an_untraceable_part_is_an_island_with_its_layers_quantized(caplog):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x) if x.sum() > -1000 else -x

    x = torch.randn(5, 4)
    model = nn.Sequential(nn.Linear(4, 4), Branch(), nn.Linear(4, 2))
    qmodel = sparsebit.quantize(model, [x])
    assert list(qmodel.islands) == ["1"] and "1: TraceError" in caplog.text
    assert {"_1_fc.weight_quantizer", "_1_fc.input_quantizer"} <= set(dict(qmodel.named_quantizers()))
    assert 30 < sqnr(model(x), qmodel(x)) < 60
    half = QuantModel(model, {"BACKEND": "virtual", "W": {"SPECIFIC": [{"1.fc": ["QUANTIZER.BIT", 4]}]}})
    assert half.model.get_submodule("1.fc").weight_quantizer.bit == 4
    asym = QuantModel(model).calibrate([x], asym=True)
    asym.set_quant(True, True)
    assert 30 < sqnr(model(x), asym(x)) < 60


# -- graphs ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bias", [False, True])
def test_batchnorm_folding(bias):
    net, x = small_net(bias=bias), images()[0]
    qmodel = QuantModel(net, {"BACKEND": "virtual", "SCHEDULE": {"FUSE_BN": True}}, check=(x,))
    assert not any("BatchNorm" in type(m).__name__ for m in qmodel.model.modules())
    torch.testing.assert_close(qmodel(x), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_batchnorm_folds_into_transposed_convolution(groups):
    from models import randomise

    net = randomise(nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=groups), nn.BatchNorm2d(6)))
    x = torch.randn(2, 4, 5, 5)
    qmodel = QuantModel(net, {"BACKEND": "virtual", "SCHEDULE": {"FUSE_BN": True}}, check=(x,))
    assert len(qmodel.model.graph.nodes) == 3


def test_batchnorm_is_not_folded_into_a_shared_or_branching_convolution():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.bn2 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x):
            y = self.conv(x)
            return self.bn(y) + y + self.bn2(self.conv(y))

    from models import randomise

    net, x = randomise(Shared()), images()[0]
    qmodel = QuantModel(net, {"BACKEND": "virtual", "SCHEDULE": {"FUSE_BN": True}}, check=(x,))
    assert sum("BatchNorm" in type(m).__name__ for m in qmodel.model.modules()) == 2
    torch.testing.assert_close(qmodel(x), net(x))


def test_weights_used_twice_have_one_quantizer():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(4, 4), nn.Tanh()

        def forward(self, x):
            return self.act(self.fc(self.act(self.fc(x))))

    net, x = Twice(), torch.randn(8, 4)
    qmodel = sparsebit.quantize(net, [x], {"BACKEND": "virtual"})
    names = [n for n, _ in qmodel.named_quantizers()]
    assert names.count("fc.weight_quantizer") == 1 and "fc_1.weight_quantizer" not in names
    assert sqnr(net(x), qmodel(x)) > 25


def test_identity_marked_by_the_user_becomes_a_quantizer():
    keep, drop = nn.Identity(), nn.Identity()
    keep.remove = False
    qmodel = sparsebit.quantize(nn.Sequential(keep, drop), [torch.randn(4, 4)], {"BACKEND": "virtual"})
    assert [n for n, _ in qmodel.named_quantizers()] == ["_0.input_quantizer"]


def test_absorbed_activations():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.ReLU(), nn.MaxPool2d(2), nn.ReLU6(), nn.Flatten(), nn.Linear(64, 4), nn.GELU()
    )
    on = QuantModel(net, {"BACKEND": "virtual"})
    off = QuantModel(net, {"BACKEND": "virtual", "SCHEDULE": {"DISABLE_UNNECESSARY_QUANT": False}})
    absorbed = lambda q: [
        n
        for n, m in q.model.named_children()
        if getattr(m, "input_quantizer", None) and m.input_quantizer.absorbed
    ]
    assert absorbed(on) == ["_1", "_6"] and absorbed(off) == []


def test_users_pass_runs_and_a_wrong_one_is_named(net):
    @graph_pass("count", keeps_output=True)
    def count(gm, ctx):
        ctx.seen = len(gm.graph.nodes)
        return 0

    @graph_pass("vandal", keeps_output=True)
    def vandal(gm, ctx):
        with torch.no_grad():
            gm.fc.weight.zero_()
        return 1

    reports = QuantModel(net, {"BACKEND": "virtual"}, passes=[count]).pass_reports
    assert "count" in [report.name for report in reports]
    with pytest.raises(GraphError, match="'vandal' must keep the model's output"):
        QuantModel(net, {"BACKEND": "virtual"}, passes=[vandal], check=(images()[0],))


def test_training_flags_are_kept():
    assert (
        QuantModel(SmallNet(), {"BACKEND": "virtual"}).training
        and not QuantModel(SmallNet().eval(), {"BACKEND": "virtual"}).training
    )


# -- files -------------------------------------------------------------------------------------------
def test_save_and_load(net, tmp_path):
    x = images()[0]
    qmodel = sparsebit.quantize(net, images(), "w4a8")
    qmodel.model.fc.weight_quantizer.set_bit(8)
    qmodel.model.layer1_0_conv1.input_quantizer.set_fake_fused()
    qmodel.save(tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors", "qconfig.yaml"]
    again = QuantModel.load(tmp_path / "out", SmallNet())
    again.eval()
    assert torch.equal(again(x), qmodel(x)) and again.model.fc.weight_quantizer.bit == 8
    assert again.cfg == qmodel.cfg


def test_load_says_what_is_missing(tmp_path):
    with pytest.raises(SparsebitError, match="holds no saved QuantModel"):
        QuantModel.load(tmp_path, SmallNet())


def test_an_interrupted_save_leaves_the_old_file(net, tmp_path, monkeypatch):
    qmodel = sparsebit.quantize(net, images())
    qmodel.save(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        qmodel.save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "qconfig.yaml"]


def test_tied_weights_save_and_load(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    x = torch.randn(5, 4)
    qmodel = sparsebit.quantize(Tied(), [x])
    qmodel.save(tmp_path)
    assert torch.equal(QuantModel.load(tmp_path, Tied())(x), qmodel(x))


# -- what it shows -----------------------------------------------------------------------------------
def test_repr_shows_bits_scheme_and_range(net):
    text = repr(sparsebit.quantize(net, images(), {"BACKEND": "virtual"}))
    assert "uniform, int8 per-channel-symmetric, observer=minmax, range=[-" in text
    assert "uint8 per-tensor-affine" in text and "QConv2d(" in text and "kernel_size=(3, 3)" in text
    assert "not calibrated" in repr(QuantModel(net, {"BACKEND": "virtual"}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype):
    net = small_net().to(dtype)
    x = [x.to(dtype) for x in images()]
    qmodel = sparsebit.quantize(net, x)
    with torch.no_grad():
        out = qmodel(x[0])
    assert out.dtype == dtype and sqnr(net(x[0]).float(), out.float()) > 15


# -- bias correction ---------------------------------------------------------------------------------
def test_bias_correction_takes_back_the_mean_error_of_weights():
    """Against the definition: the mean output difference of a layer whose weight alone is quantized."""
    torch.manual_seed(0)
    for layer, shape in (
        (nn.Conv2d(6, 8, 3, groups=2, padding=0), (64, 6, 9, 9)),
        (nn.ConvTranspose2d(6, 8, 2, stride=2, groups=2), (64, 6, 9, 9)),
        (nn.Linear(6, 8, bias=False), (640, 6)),
    ):
        net, x = nn.Sequential(layer).eval(), torch.rand(shape) + torch.rand(1, 6, *[1] * (len(shape) - 2))
        cfg = {"BACKEND": "virtual", "W": {"QUANTIZER": {"BIT": 3}}, "A": {"QUANTIZER": {"DISABLE": True}}}
        plain = sparsebit.quantize(net, [x], cfg)
        fixed = sparsebit.quantize(net, [x], {**cfg, "SCHEDULE": {"BIAS_CORRECTION": True}})
        dims = [d for d in range(len(shape)) if d != 1]
        with torch.no_grad():
            error = lambda q: (net(x) - q(x)).mean(dims).abs().max().item()
            assert error(fixed) < 0.1 * error(plain)
            fixed.set_quant(False, False)
            assert torch.equal(fixed(x), net(x))  # the float model is untouched


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_asym_gives_the_same_scales_wherever_values_wait(net, offload):
    def scales(where):
        qmodel = QuantModel(net, "w4a4")
        qmodel.prepare_calibration()
        with torch.no_grad():
            for x in images():
                qmodel(x)
        qmodel.calc_qparams(asym=True, offload=where)
        return [q.scale for _, q in qmodel.named_quantizers()]

    assert all(torch.equal(a, b) for a, b in zip(scales("device"), scales(offload)))


def test_asym_observes_every_call_of_a_shared_layer():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(10 * self.fc(x))

    x = torch.randn(8, 4)
    ranges = [
        QuantModel(Twice(), {"BACKEND": "virtual"}).calibrate([x], asym=asym).model.fc.input_quantizer.scale
        for asym in (0, 1)
    ]
    torch.testing.assert_close(*ranges, rtol=0.3, atol=0)  # both saw the large input of the second call


def test_asym_with_bias_correction_runs(net):
    qmodel = sparsebit.quantize(net, images(), "w4a4", asym=True)
    assert sqnr(net(images()[0]), qmodel(images()[0])) > 3
