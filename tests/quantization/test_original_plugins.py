"""Plug-ins written for the original: registered, replaced, calibrated, trained, saved and exported."""

from __future__ import annotations

import copy
import logging
import math
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsebit
from models import images, small_net, sqnr
from sparsebit.errors import CalibrationError, ConfigError, RegistryError
from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.common import Granularity
from sparsebit.quantization.modules import (
    QMODULE_MAP,
    MultipleInputsQuantOpr,
    QReLU,
    QuantOpr,
    define,
    register_qmodule,
)
from sparsebit.quantization.observers import OBSERVERS_MAP, build_observer, register_observer
from sparsebit.quantization.observers import Observer as BaseObserver
from sparsebit.quantization.quantizers import QUANTIZERS_MAP, build_quantizer, register_quantizer
from sparsebit.quantization.quantizers import Quantizer as BaseQuantizer
from sparsebit.quantization.quantizers.quant_descriptor import QuantDescriptor
from sparsebit.quantization.quantizers.quant_tensor import STE, torch_fake_quant
from sparsebit.registry import Registry


@pytest.fixture(autouse=True)
def registries_come_back():
    registries = (QMODULE_MAP, OBSERVERS_MAP, QUANTIZERS_MAP)
    saved = [dict(registry) for registry in registries]
    yield
    for registry, items in zip(registries, saved):
        registry.clear()
        registry.update(items)


def section(letter, *overrides):
    return getattr(sparsebit.QuantConfig.load({"BACKEND": "virtual"}).override(*overrides), letter.lower())


def config(
    w="uniform", a="uniform", bit=8, w_scheme="per-channel-symmetric", a_scheme="per-tensor-affine", **kw
):
    observers = {"W": {"TYPE": kw.pop("w_observer", "MINMAX")}, "A": {"TYPE": kw.pop("a_observer", "MINMAX")}}
    return parse_qconfig(
        {
            "BACKEND": kw.pop("backend", "virtual"),
            **kw,
            "W": {"QSCHEME": w_scheme, "QUANTIZER": {"TYPE": w, "BIT": bit}, "OBSERVER": observers["W"]},
            "A": {"QSCHEME": a_scheme, "QUANTIZER": {"TYPE": a, "BIT": bit}, "OBSERVER": observers["A"]},
        }
    )


def lifecycle(net, cfg, batches, tmp_path=None, **options):
    """Calibrate, quantize, save and load, export, train a step: what a script of the original does."""
    qmodel = QuantModel(net, config=cfg)
    qmodel.prepare_calibration()
    with torch.no_grad():
        for x in batches:
            qmodel(x)
    qmodel.calc_qparams(**options)
    qmodel.set_quant(w_quant=True, a_quant=True)
    with torch.no_grad():
        out = qmodel(batches[0])
    fresh = QuantModel(net, config=cfg)
    fresh.load_state_dict(qmodel.state_dict())
    fresh.eval()
    fresh.set_quant(w_quant=True, a_quant=True)
    with torch.no_grad():
        torch.testing.assert_close(fresh(batches[0]), out)
        torch.testing.assert_close(copy.deepcopy(qmodel)(batches[0]), out)
    if tmp_path is not None:
        assert qmodel.export_onnx(batches[0], name=str(tmp_path / "model.onnx"), extra_info=True).ok
    qmodel.train()
    qmodel(batches[0]).square().mean().backward()
    weights = [m.weight for m in qmodel.model.modules() if isinstance(m, QuantOpr) and m.weight is not None]
    assert all(w.grad is not None and w.grad.isfinite().all() for w in weights)
    qmodel.eval()
    return qmodel, out


# -- registries ----------------------------------------------------------------------------------------------
def test_a_plug_in_over_a_built_in_one_warns_once_for_all_its_sources(caplog):
    from sparsebit.sparse.sparsers import SPARSERS_MAP

    @register_qmodule(sources=[nn.ReLU, F.relu, torch.Tensor.relu])
    class QMyReLU(QuantOpr):
        pass

    rows = [r for r in caplog.records if "replaces the built-in" in r.message]
    assert len(rows) == 1 and rows[0].name == "sparsebit" and rows[0].levelno == logging.WARNING
    assert "torch.nn.functional.relu" in rows[0].message and "modules.activations.QReLU" in rows[0].message
    assert QMODULE_MAP[torch.Tensor.relu] is QMyReLU
    assert define("QMyGELU", QuantOpr, nn.GELU, F.gelu) is QMODULE_MAP[F.gelu]
    known = SPARSERS_MAP["l1norm"]
    try:
        SPARSERS_MAP.register("l1norm")(type("Sparser", (known,), {"__module__": __name__}))
        assert "sparser 'l1norm'" in caplog.text and SPARSERS_MAP["L1Norm"] is not known
    finally:
        SPARSERS_MAP["l1norm"] = known


def test_two_plug_ins_of_the_user_under_one_name_are_refused():
    registry = Registry("observer")
    first, second = (type(name, (), {"__module__": __name__}) for name in ("First", "Second"))
    registry.add(["mine"], first)
    with pytest.raises(RegistryError, match="'mine' is already registered"):
        registry.add(["other", "mine"], second)
    assert "other" not in registry  # all or nothing
    again = type("First", (), {"__module__": __name__})
    registry.add(["mine"], again)  # a notebook cell that runs twice
    assert registry["mine"] is again
    registry.add(["mine"], second, replace=True)
    assert registry["mine"] is second


def test_the_built_in_plug_in_can_come_back():
    known = QMODULE_MAP[nn.ReLU]
    define("QMyReLU", QuantOpr, nn.ReLU)
    register_qmodule(sources=[nn.ReLU])(known)
    assert QMODULE_MAP[nn.ReLU] is QReLU


def test_registries_are_dictionaries():
    assert QMODULE_MAP.setdefault(nn.ReLU, nn.Identity) is QReLU
    QMODULE_MAP.update({nn.ReLU: nn.Identity})
    assert QMODULE_MAP[nn.ReLU] is nn.Identity
    del QMODULE_MAP[nn.ReLU]
    assert nn.ReLU not in QMODULE_MAP and QMODULE_MAP.pop(nn.ReLU, None) is None
    with pytest.raises(KeyError, match="unknown operation"):
        del QMODULE_MAP[nn.ReLU]
    QUANTIZERS_MAP["LSQ_plus"] = BaseQuantizer
    assert QUANTIZERS_MAP.pop("lsq+") is BaseQuantizer
    qmodel = QuantModel(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), config())
    assert list(qmodel.float_ops.values()) == ["1 (ReLU)"]  # without its entry, an op stays float


# -- observers -----------------------------------------------------------------------------------------------
class MinMax(BaseObserver):
    TYPE = "minmax"

    def __init__(self, config, qdesc):
        super().__init__(config, qdesc)

    def calc_minmax(self):
        if self.is_perchannel:
            data = self.data_cache.get_data_for_calibration(Granularity.CHANNELWISE)
            max_val, min_val = data.max(axis=1).values, data.min(axis=1).values
        else:
            data = self.data_cache.get_data_for_calibration(Granularity.LAYERWISE)
            assert data.dim() == 1
            max_val, min_val = data.max(), data.min()
        self.data_cache.reset()
        self.max_val = max_val.to(self.device)
        self.min_val = min_val.to(self.device)
        return self.min_val, self.max_val


@pytest.mark.parametrize("a_scheme", ["per-tensor-affine", "per-channel-affine"])
def test_an_observer_of_the_original_in_place_of_the_built_in_one(a_scheme, tmp_path):
    net, batches = small_net(), images()
    cfg = config(a_scheme=a_scheme)
    path = tmp_path if "tensor" in a_scheme else None
    _, want = lifecycle(net, cfg, batches)
    register_observer(MinMax)
    qmodel, out = lifecycle(net, cfg, batches, path)
    assert type(qmodel.model.fc.input_quantizer.observer) is MinMax
    torch.testing.assert_close(out, want)
    assert not qmodel.model.fc.input_quantizer.observer.kept  # the batches are given back


def test_an_observer_that_takes_the_place_of_another_keeps_its_section():
    @register_observer
    class Observer(BaseObserver):
        TYPE = "percentile"

        def __init__(self, config, qdesc):
            super().__init__(config, qdesc)
            self.alpha = config.OBSERVER.PERCENTILE.ALPHA

        def calc_minmax(self):
            data = self.data_cache.get_data_for_calibration(Granularity.LAYERWISE)
            self.data_cache.reset()
            return data.quantile(self.alpha), data.quantile(1 - self.alpha)

    cfg = parse_qconfig(
        {"BACKEND": "virtual", "A": {"OBSERVER": {"TYPE": "PERCENTILE", "PERCENTILE": {"ALPHA": 0.25}}}}
    )
    x = torch.linspace(-1, 1, 100).reshape(10, 10)
    qmodel = QuantModel(nn.Sequential(nn.Linear(10, 2)), cfg).calibrate([x])
    assert qmodel.model._0.input_quantizer.observer.max_val.item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("name", sorted(OBSERVERS_MAP))
@pytest.mark.parametrize("letter", "WA")
def test_a_built_in_observer_is_fed_through_its_cache(name, letter):
    cfg = section(letter, f"{letter}.OBSERVER.TYPE", name)
    batches = [torch.randn(4, 3, 5, 5) for _ in range(1 if letter == "W" else 3)]
    plain, observer = (build_observer(cfg, QuantDescriptor(cfg)) for _ in range(2))
    for x in batches:
        plain.update(x)
        observer.data_cache.update(x)
    assert len(observer.data_cache) == len(batches)
    flat = observer.data_cache.get_data_for_calibration(Granularity.LAYERWISE)
    assert torch.equal(flat, torch.cat([x.flatten() for x in batches]))
    rows = observer.data_cache.get_data_for_calibration(Granularity.CHANNELWISE)
    assert rows.shape == ((4, 75) if letter == "W" else (3, 300))
    for mine, want in zip(observer.calc_qparams(), plain.calc_qparams()):
        assert torch.equal(mine, want)
    observer.data_cache.reset()
    assert not observer.has_data and not observer.kept
    with pytest.raises(CalibrationError, match="kept none of them"):
        plain.data_cache.get_data_for_calibration(Granularity.LAYERWISE)


# -- quantizers ----------------------------------------------------------------------------------------------
class OwnFormula(BaseQuantizer):
    TYPE = "own_formula"

    def __init__(self, config):
        super().__init__(config)

    def _forward(self, x, scale, zero_point):
        assert scale.dim() in (1, x.dim())
        codes = torch.clamp(torch.round(x / scale) + zero_point, self.qdesc.qmin, self.qdesc.qmax)
        return x + ((codes - zero_point) * scale - x).detach()


class OwnSTE(BaseQuantizer):
    TYPE = "own_ste"

    def _forward(self, x, scale, zero_point):
        return STE.apply(x, scale, zero_point, self.qdesc, self.backend)


class OwnSuper(BaseQuantizer):
    TYPE = "own_super"

    def _forward(self, x, scale, zero_point):
        low, high = (self.qdesc.qmin - zero_point) * scale, (self.qdesc.qmax - zero_point) * scale
        return super()._forward(torch.minimum(torch.maximum(x, low), high), scale, zero_point)


@pytest.mark.parametrize("cls", [OwnFormula, OwnSTE, OwnSuper])
@pytest.mark.parametrize("w_scheme", ["per-tensor-affine", "per-channel-symmetric", "per-channel-affine"])
def test_scales_broadcast_in_a_whole_model(cls, w_scheme, tmp_path):
    register_quantizer(cls)
    net, batches = small_net(bias=True), images()
    schemes = {"w_scheme": w_scheme, "bit": 8}
    _, want = lifecycle(net, config(**schemes), batches)
    kind = cls.TYPE
    path = tmp_path if w_scheme == "per-channel-symmetric" else None
    _, out = lifecycle(net, config(kind, kind, **schemes), batches, path)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize(
    "layout, shape", [("NCHW", (2, 3, 4, 5)), ("NLC", (2, 4, 3)), ("NLC", (7, 3)), ("NCHW", (3,))]
)
@pytest.mark.parametrize("cls", [OwnFormula, OwnSTE, OwnSuper])
def test_scales_broadcast_over_activations_of_any_layout(cls, layout, shape):
    register_quantizer(cls)
    options = ("A.QSCHEME", "per-channel-affine", "A.OBSERVER.LAYOUT", layout, "A.QUANTIZER.BIT", 4)
    x, out = torch.randn(shape) * torch.rand(shape), []
    for kind in ("uniform", cls.TYPE):
        q = build_quantizer(section("A", *options, "A.QUANTIZER.TYPE", kind))
        q.update_observer(x)
        q.calc_qparams()
        q.enable_quant()
        out.append(q(x))
    torch.testing.assert_close(*out)
    assert len(q.scale) == 3


@pytest.mark.parametrize("cls", [OwnFormula, OwnSTE, OwnSuper])
def test_a_formula_gets_groups_as_rows(cls):
    register_quantizer(cls)
    net, x = nn.Sequential(nn.Linear(32, 6)), torch.randn(4, 32)
    out = []
    for kind in ("uniform", cls.TYPE):
        cfg = sparsebit.QuantConfig.load("w4a8").override("W.GROUP", 8, "W.QUANTIZER.TYPE", kind)
        out.append(sparsebit.quantize(net, [x], cfg)(x))
    torch.testing.assert_close(*out)


def test_values_of_the_original_shapes():
    """A script that reads `quantizer.scale` gets the original's shape by `_broadcast_qparams`."""
    qmodel = QuantModel(small_net(), config())
    conv, fc = qmodel.model.conv1, qmodel.model.fc
    with pytest.raises(CalibrationError, match="has seen no value yet"):
        conv.input_quantizer._broadcast_qparams(conv.input_quantizer.scale)
    qmodel.calibrate(images())
    for layer, shape in ((conv, (8, 1, 1, 1)), (fc, (10, 1))):
        scale = layer.weight_quantizer._broadcast_qparams(layer.weight_quantizer.scale)
        assert scale.shape == shape and layer.weight_quantizer.device == scale.device
        codes = (layer.weight / scale).round()
        layer.weight_quantizer.enable_quant()
        torch.testing.assert_close(codes.clamp(-128, 127) * scale, layer.weight_quantizer(layer.weight))
    assert conv.input_quantizer._broadcast_qparams(conv.input_quantizer.scale).shape == (1, 1, 1, 1)
    grouped = QuantModel(
        nn.Sequential(nn.Linear(32, 6)), sparsebit.QuantConfig.load("w4a8").override("W.GROUP", 8)
    )
    with pytest.raises(ConfigError, match=r"reshape\(-1, 8\)"):
        grouped.model._0.weight_quantizer._broadcast_qparams(torch.ones(24))


def test_a_descriptor_of_the_original():
    qdesc = QuantDescriptor(section("A", "A.QUANTIZER.BIT", 4, "A.QSCHEME", "per-tensor-affine"))
    assert (qdesc._type, qdesc.qrange) == ("uint4", (0, 15))
    assert qdesc.calc_qmin_qmax(8, torch.per_channel_symmetric) == (-128, 127)
    assert qdesc.calc_qmin_qmax(3, "per-tensor-affine") == (0, 7)
    qdesc.set_symmetric(True)
    assert (qdesc._type, qdesc.bit, qdesc.qrange) == ("int4", 4, (-8, 7))


class OriginalLSQ(BaseQuantizer):
    """A learned scale, written as in 2023: data from the cache, parameters of the shape (C, 1, 1, 1)."""

    TYPE = "lsq"

    def __init__(self, config):
        super().__init__(config)
        self.init_params = False

    def calc_qparams(self):
        if self.fake_fused:
            return self.scale, self.zero_point
        if not self.init_params:
            granularity = Granularity.CHANNELWISE if self.is_perchannel else Granularity.LAYERWISE
            data = self.observer.data_cache.get_data_for_calibration(granularity)
            self.observer.data_cache.reset()
            if data.min() < 0 and not self.is_symmetric:
                self.qdesc.set_symmetric(True)
            mean = data.abs().mean(axis=1) if self.is_perchannel else data.abs().mean()
            scale = 2 * mean / math.sqrt(self.qdesc.qmax)
            self.scale = nn.Parameter(self._broadcast_qparams(scale.to(self.device)))
            self.zero_point = self._broadcast_qparams(torch.zeros_like(self.scale))
            self.init_params = True
        return self.scale, self.zero_point

    def _qparams_preprocess(self, x):
        return self.scale.abs(), self.zero_point

    def _forward(self, x, scale, zero_point):
        ratio = 1 / math.sqrt(x.numel() / scale.numel() * self.qdesc.qmax)
        step = scale * ratio + (scale - scale * ratio).detach()
        clipped = torch.clamp(x / step, self.qdesc.qmin, self.qdesc.qmax)
        return (clipped + (clipped.round() - clipped).detach()) * step


def test_a_learned_scale_of_the_original(tmp_path):
    register_quantizer(OriginalLSQ)
    net, batches = small_net(), images()
    cfg = config("lsq", "lsq", bit=4, a_scheme="per-tensor-symmetric")
    qmodel, out = lifecycle(net, cfg, batches, tmp_path, asym=False)
    layer = qmodel.model.fc
    assert type(layer.weight_quantizer) is OriginalLSQ and layer.weight_quantizer.scale.shape == (10, 1)
    assert layer.weight_quantizer.scale.grad.abs().sum() > 0
    assert not layer.weight_quantizer.observer.kept and not layer.input_quantizer.observer.kept
    assert sqnr(net(batches[0]), out) > 5


def test_a_scale_that_is_set_through_data():
    @register_quantizer
    class Quantizer(BaseQuantizer):
        TYPE = "through_data"

        def calc_qparams(self):
            scale, zero_point = self.observer.calc_qparams()
            self.scale.data = self._broadcast_qparams(scale)
            self.zero_point.data = self._broadcast_qparams(zero_point)
            return self.scale, self.zero_point

    net, batches = small_net(), images()
    _, want = lifecycle(net, config(), batches)
    _, out = lifecycle(net, config("through_data", "through_data"), batches)
    torch.testing.assert_close(out, want)


def test_an_update_observer_of_the_original():
    @register_quantizer
    class Quantizer(BaseQuantizer):
        TYPE = "own_tanh"

        def update_observer(self, x):
            self.dims = len(x.shape)
            self.observer.data_cache.update(torch.tanh(x).detach())

        def _forward(self, x, scale, zero_point):
            return torch_fake_quant(torch.tanh(x), scale, zero_point, self.qdesc)

    qmodel, _ = lifecycle(small_net(), config(w="own_tanh"), images())
    weight = qmodel.model.fc.weight_quantizer
    assert weight.observer.max_val.amax() <= 1
    assert weight.device == qmodel.model.fc.weight.device


def test_batches_are_kept_only_for_who_may_read_them():
    class Reads(BaseQuantizer):
        TYPE = "reads"

        def calc_qparams(self):
            return super().calc_qparams()

    class ReadsNot(Reads):
        TYPE = "reads_not"
        keeps_batches = False

    register_quantizer(Reads)
    register_quantizer(ReadsNot)
    register_quantizer(OwnFormula)
    kept = {}
    for name in QUANTIZERS_MAP:
        try:
            q = build_quantizer(section("A", "A.QUANTIZER.TYPE", name))
        except ConfigError:
            continue
        for _ in range(3):
            q.update_observer(torch.randn(2, 3))
        kept[name] = len(q.observer.kept)
    assert {name for name, count in kept.items() if count} == {"reads"} and kept["reads"] == 3
    assert len(kept) > 6


# -- ops -----------------------------------------------------------------------------------------------------
class QHardswish(QuantOpr):
    def __init__(self, org_module, config=None):
        super().__init__()
        self._repr_info = "QHardswish of the user"

    def forward(self, x_in, *args, **kwargs):
        return F.hardswish(self.input_quantizer(x_in))


class QOwnConv2d(QuantOpr):
    def __init__(self, org_module, config=None):
        super().__init__()
        self.cfg = config
        self._repr_info = "Q" + org_module.__repr__()
        options = ("stride", "padding", "dilation", "groups")
        self.fwd_kwargs = {name: getattr(org_module, name) for name in options}
        self.weight = nn.Parameter(org_module.weight.detach().clone())
        self.bias = org_module.bias

    def build_quantizer(self, config):
        QuantOpr.build_quantizer(self, config)
        self.input_quantizer.set_fake_fused()

    def forward(self, x_in, *args):
        x_in = self.input_quantizer(x_in)
        weight = self.weight_quantizer(self.weight)
        return F.conv2d(x_in, weight, self.bias, **self.fwd_kwargs)


class QSub(MultipleInputsQuantOpr):
    def __init__(self, org_module=None, config=None):
        super().__init__()
        self._repr_info = "QSub"
        self.apply_input_quant = config.A.QADD.ENABLE_QUANT

    def forward(self, x_left, x_right):
        return x_left - x_right


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Hardswish(), nn.Linear(4, 5)

    def forward(self, x):
        x = self.act(self.conv(x))
        x = x - F.hardswish(x)
        return self.fc(x.mean((2, 3)))


@pytest.mark.parametrize("enabled", [True, False])
def test_ops_of_the_original_through_a_whole_lifecycle(enabled, tmp_path):
    register_qmodule(sources=[nn.Hardswish, F.hardswish])(QHardswish)
    register_qmodule(sources=[nn.Conv2d])(QOwnConv2d)
    register_qmodule(sources=[operator.sub, torch.sub])(QSub)
    torch.manual_seed(0)
    net, batches = Net().eval(), images()
    cfg = config()
    cfg.defrost()
    cfg.A.QADD.ENABLE_QUANT = enabled
    cfg.freeze()
    qmodel, out = lifecycle(net, cfg, batches, tmp_path)
    model = qmodel.model
    assert type(model.act) is type(model.hardswish) is QHardswish and type(model.conv) is QOwnConv2d
    assert model.conv.input_quantizer.fake_fused and model.conv.weight_quantizer.scale.shape == (4,)
    assert hasattr(model, "sub_identity0") is enabled and model.sub.input_quantizer_generated is enabled
    assert "QHardswish of the user" in repr(model.act) and "Conv2d(3, 4" in repr(model.conv)
    assert sqnr(net(batches[0]), out) > 25
    assert "act" in qmodel.get_quantization_error(batches[0])


def test_a_plain_module_as_an_op():
    @register_qmodule(sources=[nn.Hardswish])
    class Plain(nn.Module):
        def __init__(self, org_module=None, config=None):
            super().__init__()

        def forward(self, x_in):
            return F.hardswish(x_in)

    qmodel, _ = lifecycle(nn.Sequential(nn.Linear(4, 4), nn.Hardswish()), config(), [torch.randn(8, 4)])
    assert type(qmodel.model._1) is Plain


def test_the_batch_norm_inside_a_quantized_one():
    net = small_net()
    qmodel = QuantModel(net, config())
    bn = qmodel.model.bn1
    assert isinstance(bn.module, nn.BatchNorm2d) and torch.equal(bn.module.weight, net.bn1.weight)
    x = torch.randn(4, 8, 5, 5)
    torch.testing.assert_close(bn.module(x), bn(x))
    bn.module.weight.data.mul_(2)
    bn.module.reset_running_stats()
    assert not bn.running_mean.any() and torch.equal(bn.weight, 2 * net.bn1.weight)
    torch.testing.assert_close(bn.module(x), bn(x))
    assert "bn1.weight" in qmodel.model.state_dict() and len(list(bn.children())) == 0


def test_a_convolution_tells_its_options():
    conv = QuantModel(nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1, groups=2)), config()).model._0
    assert conv.fwd_kwargs == {"stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "groups": 2}
    x = torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(F.conv2d(x, conv.weight, conv.bias, **conv.fwd_kwargs), conv(x))
    assert conv._repr_info.startswith("QConv2d(4, 8, kernel_size=(3, 3), stride=(2, 2)")
    relu = QuantModel(nn.Sequential(nn.ReLU()), config()).model._0
    assert relu._repr_info == "QReLU()"
