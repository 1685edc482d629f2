"""Code written for the original Sparsebit, in the forms its users wrote it: it runs, and it computes the same."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.sparse import SparseModel, parse_sconfig

CONFIG = {
    "BACKEND": "virtual",
    "W": {"QSCHEME": "per-channel-symmetric", "QUANTIZER": {"TYPE": "uniform", "BIT": 8}},
    "A": {"QSCHEME": "per-tensor-affine", "QUANTIZER": {"TYPE": "uniform", "BIT": 8}},
}
UNSTRUCTURED = {"SPARSER": {"TYPE": "unstructed", "STRATEGY": "l1norm", "RATIO": 0.5}}


def qconfig(**sections):
    return parse_qconfig({**CONFIG, **sections})


def calibrated(model: nn.Module, *batch: torch.Tensor, **sections) -> QuantModel:
    qmodel = QuantModel(model, qconfig(**sections))
    qmodel.prepare_calibration()
    qmodel(*batch)
    qmodel.calc_qparams()
    qmodel.set_quant(w_quant=True, a_quant=True)
    return qmodel


# -- inputs ------------------------------------------------------------------------------------------------
class OptionalInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x=None):
        return self.fc(x)


class UnusedInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x, metas):
        return self.fc(x)


def test_an_optional_input_is_an_input():
    x = torch.randn(2, 4)
    model = OptionalInput()
    assert torch.allclose(QuantModel(model, qconfig())(x), model(x))


def test_an_input_that_is_never_read_may_be_left_out():
    x = torch.randn(2, 4)
    model = UnusedInput()
    qmodel = QuantModel(model, qconfig())
    assert torch.allclose(qmodel(x), model(x, None))
    assert torch.allclose(qmodel(x, [{"ori_shape": 3}]), model(x, None))


# -- export ------------------------------------------------------------------------------------------------
class TwoReaders(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        return self.b(x) + self.c(x)


class IntegerMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, mask):
        return self.fc(x) + (1.0 - mask) * -10000.0


def test_pact_exports_a_value_with_two_readers(tmp_path):
    pact = {"QSCHEME": "per-tensor-affine", "QUANTIZER": {"TYPE": "pact", "BIT": 4}}
    qmodel = calibrated(TwoReaders(), torch.randn(8, 4), A=pact)
    assert qmodel.export_onnx(torch.randn(1, 4), str(tmp_path / "pact.onnx"), extra_info=True).ok


def test_integer_masks_export(tmp_path):
    batch = (torch.randn(2, 4), torch.ones(2, 4, dtype=torch.long))
    qmodel = calibrated(IntegerMask(), *batch)
    assert qmodel.export_onnx(batch, str(tmp_path / "mask.onnx")).ok


# -- pruning -----------------------------------------------------------------------------------------------
class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))

    def forward(self, x):
        return self.layer1(x)


def test_l0norm_is_a_name_of_l0():
    config = parse_sconfig({"SPARSER": {"TYPE": "l0norm", "STRATEGY": "structured", "RATIO": 0.5}})
    assert config.SPARSER.TYPE == "structured"


def test_sparse_layers_by_fx_name_and_by_path():
    config = parse_sconfig({"SPARSER": {"TYPE": "structed", "STRATEGY": "l1norm", "RATIO": 0.5}})
    smodel = SparseModel(Nested(), config)
    smodel.model.layer1_0.sparser.set_ratio(0.0)
    assert smodel.model.get_submodule("layer1.0").sparser.ratio == 0.0


def test_sparse_model_has_its_config():
    smodel = SparseModel(nn.Sequential(nn.Linear(4, 4)), parse_sconfig(UNSTRUCTURED))
    assert smodel.config.SPARSER.RATIO == 0.5


def test_training_the_sparse_model_trains_the_model_it_was_given():
    net = nn.Sequential(nn.Linear(4, 4))
    before = net[0].weight.clone()
    smodel = SparseModel(net, parse_sconfig(UNSTRUCTURED))
    smodel.calc_params()
    optimizer = torch.optim.SGD(smodel.parameters(), 0.1)
    smodel(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, net[0].weight)


def test_a_sparser_with_calc_mask_alone():
    from sparsebit.sparse.sparsers import Sparser as Base
    from sparsebit.sparse.sparsers import register_sparser

    @register_sparser
    class Sparser(Base):
        STRATEGY = "own_mag"

        def __init__(self, config, opr):
            super().__init__(config, opr)

        def calc_mask(self, x):
            return (x.abs() > x.abs().median()).float()

    config = {"SPARSER": {"TYPE": "unstructed", "STRATEGY": "own_mag", "RATIO": 0.5}}
    smodel = SparseModel(nn.Sequential(nn.Linear(4, 4)), parse_sconfig(config))
    smodel.calc_params()
    assert smodel.sparsity()["0"] == pytest.approx(0.5, abs=0.07)


def test_a_sparse_module_that_calls_init_without_arguments():
    from sparsebit.sparse.modules import SparseOpr

    class SOwn(SparseOpr):
        def __init__(self, org_module, config=None):
            super().__init__()
            self._repr_info = "SOwn"

    SOwn(nn.Linear(2, 2))


# -- plug-ins of quantization ------------------------------------------------------------------------------
@pytest.fixture
def registries_come_back():
    from sparsebit.quantization.modules import QMODULE_MAP
    from sparsebit.quantization.observers import OBSERVERS_MAP
    from sparsebit.quantization.quantizers import QUANTIZERS_MAP

    registries = (QMODULE_MAP, OBSERVERS_MAP, QUANTIZERS_MAP)
    saved = [dict(registry._items) for registry in registries]
    yield
    for registry, items in zip(registries, saved):
        registry._items.clear()
        registry._items.update(items)


def test_an_op_registered_over_a_built_in_one(registries_come_back, caplog):
    from sparsebit.quantization.modules import QMODULE_MAP, QuantOpr, register_qmodule

    @register_qmodule(sources=[nn.Hardswish, F.hardswish])
    class QHardswish(QuantOpr):
        def __init__(self, org_module, config=None):
            super().__init__()
            self._repr_info = "QHardswish"

        def forward(self, x_in, *args):
            return F.hardswish(self.input_quantizer(x_in))

    assert QMODULE_MAP[nn.Hardswish] is QHardswish
    assert "Hardswish" in caplog.text
    qmodel = calibrated(nn.Sequential(nn.Hardswish()), torch.randn(4, 4))
    assert isinstance(qmodel.model._0, QHardswish)


def test_an_observer_registered_over_a_built_in_one(registries_come_back, caplog):
    from sparsebit.quantization.observers import OBSERVERS_MAP, register_observer
    from sparsebit.quantization.observers import Observer as Base

    @register_observer
    class Observer(Base):
        TYPE = "minmax"

        def calc_minmax(self):
            return self.min_val, self.max_val

    assert OBSERVERS_MAP["minmax"] is Observer
    assert "minmax" in caplog.text
    x = torch.tensor([[-1.0, 2.0, 0.0, 1.0]])
    qmodel = calibrated(nn.Sequential(nn.Linear(4, 4)), x)
    assert float(qmodel.model._0.input_quantizer.scale) == pytest.approx(3 / 255)


def test_registries_take_items(registries_come_back):
    from sparsebit.quantization.modules import QMODULE_MAP, QReLU

    QMODULE_MAP[nn.ReLU] = QReLU
    assert QMODULE_MAP.pop(nn.ReLU) is QReLU
    assert nn.ReLU not in QMODULE_MAP


def test_scales_broadcast_over_what_a_quantizer_gets(registries_come_back):
    from sparsebit.quantization.quantizers import Quantizer as Base
    from sparsebit.quantization.quantizers import register_quantizer

    @register_quantizer
    class Quantizer(Base):
        TYPE = "own_formula"

        def _forward(self, x, scale, zero_point):
            codes = torch.clamp((x / scale).round() + zero_point, self.qdesc.qmin, self.qdesc.qmax)
            return (codes - zero_point) * scale

    net = nn.Sequential(nn.Linear(6, 6))
    net[0].weight.data *= torch.logspace(-2, 1, 6)[:, None]
    x = torch.randn(4, 6)
    scheme = "per-channel-symmetric"
    out = [
        calibrated(net, x, W={"QSCHEME": scheme, "QUANTIZER": {"TYPE": kind, "BIT": 4}})(x)
        for kind in ("uniform", "own_formula")
    ]
    assert torch.allclose(*out)


def test_a_quantizer_reads_the_data_cache_of_its_observer(registries_come_back):
    from sparsebit.quantization.common import Granularity
    from sparsebit.quantization.quantizers import Quantizer as Base
    from sparsebit.quantization.quantizers import register_quantizer

    @register_quantizer
    class Quantizer(Base):
        TYPE = "guide_q"

        def calc_qparams(self):
            data = self.observer.data_cache.get_data_for_calibration(Granularity.CHANNELWISE)
            self.observer.data_cache.reset()
            return self._set_qparams(data.abs().amax(1) / 127, torch.zeros(len(data)))

    weights = {"QSCHEME": "per-channel-symmetric", "QUANTIZER": {"TYPE": "guide_q", "BIT": 8}}
    net = nn.Sequential(nn.Linear(4, 4))
    qmodel = calibrated(net, torch.randn(2, 4), W=weights)
    expected = net[0].weight.detach().abs().amax(1) / 127
    assert torch.allclose(qmodel.model._0.weight_quantizer.scale.flatten(), expected)


def test_layerwise_data_is_flat():
    from sparsebit.quantization.common import Granularity
    from sparsebit.quantization.observers.base import DataCache

    qmodel = QuantModel(nn.Sequential(nn.Linear(4, 4)), qconfig())
    cache = DataCache(qmodel.model._0.input_quantizer.qdesc)
    cache.update(torch.randn(5, 4))
    assert cache.get_data_for_calibration(Granularity.LAYERWISE).shape == (20,)


# -- calibration -------------------------------------------------------------------------------------------
def test_asym_sees_batches_that_went_through_the_inner_model():
    qmodel = QuantModel(nn.Sequential(nn.Linear(4, 4)), qconfig())
    qmodel.prepare_calibration()
    with torch.no_grad():
        qmodel.model(torch.randn(8, 4))
    qmodel.calc_qparams(asym=True, w_quant=True, a_quant=True)
    assert float(qmodel.model._0.input_quantizer.scale) > 0


# -- names -------------------------------------------------------------------------------------------------
FUSIONS = "sparsebit.quantization.converters.fuse_operations"
SIMPLIFIERS = "sparsebit.quantization.converters.simplifiers"
IMPORTS = {
    "sparsebit.utils.yaml_utils": "update_config",
    "sparsebit.utils.common": "check_torch_version",
    "sparsebit.quantization.utils": "fx_symbolic_trace",
    "sparsebit.quantization.observers.utils": "mse_loss",
    "sparsebit.quantization.observers.kl_histogram": "get_best_threshold",
    "sparsebit.quantization.modules.math": "QMean",
    "sparsebit.quantization.modules.unary": "QSoftmax Where",
    "sparsebit.sparse.modules.conv": "SConv2d",
    "sparsebit.sparse.modules.linear": "SLinear",
    "sparsebit.sparse.modules.normalization": "SBatchNorm2d",
    FUSIONS: "fuse_operations",
    f"{FUSIONS}.lists": "lists",
    f"{FUSIONS}.fuse_bn": "ReplacePattern",
    f"{FUSIONS}.disable_unnecessary_quant": "ReplacePattern_DisableQuant make_chain_connection ReplacePatterns",
    f"{SIMPLIFIERS}.lists": "lists",
    f"{SIMPLIFIERS}.remove_identity": "ReplacePattern",
    f"{SIMPLIFIERS}.getattr_to_shape": "ReplacePattern",
    f"{SIMPLIFIERS}.unbind_getitem_to_subtensor": "ReplacePattern",
}


@pytest.mark.parametrize("module", IMPORTS)
def test_import_paths_of_the_original(module):
    found = importlib.import_module(module)
    missing = [name for name in IMPORTS[module].split() if not hasattr(found, name)]
    assert not missing


class ConvNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn(self.c(x))


def test_attributes_of_the_original():
    from sparsebit.quantization.calibration.runner import CalibrationRunner
    from sparsebit.quantization.tools.graph_wrapper import GraphVisitor

    qmodel = QuantModel(ConvNorm().eval(), qconfig())
    qmodel.prepare_calibration()
    steps = "_trace _run_simplifiers _convert2quantmodule _build_quantizer _run_fuse_operations"
    expected = [
        (qmodel, f"calibration_runner {steps}"),
        (qmodel.model.bn, "module"),
        (qmodel.model.c, "fwd_kwargs _repr_info"),
        (qmodel.model.c.weight_quantizer, "device _broadcast_qparams"),
        (qmodel.model.c.weight_quantizer.qdesc, "calc_qmin_qmax _type"),
        (CalibrationRunner, "run_feature_calibration run_weight_calibration module_forward"),
        (GraphVisitor, "build"),
    ]
    missing = [
        f"{owner!r:.20}.{name}"
        for owner, names in expected
        for name in names.split()
        if not hasattr(owner, name)
    ]
    assert not missing


def test_configs_as_yacs_has_them():
    from sparsebit.quantization.common import QuantTarget
    from sparsebit.quantization.quant_config import _C
    from sparsebit.utils import update_config

    config = _C.clone()
    config.defrost()
    config.merge_from_other_cfg(_C.clone())
    config.MY_KEY = 1
    assert config.MY_KEY == 1
    update_config(config.W, "TARGET", (QuantTarget.WEIGHT,))
