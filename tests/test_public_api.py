"""What existing scripts import and call, as a table (SPARSEBIT.md 1.1 to 1.3 and part 4)."""

from __future__ import annotations

import importlib
import inspect
import io

import pytest
import torch
from torch import nn

from models import images, small_net

IMPORTS = {
    "sparsebit": "quantize prune QuantModel QuantConfig __version__",
    "sparsebit.quantization": "QuantModel parse_qconfig",
    "sparsebit.quantization.quant_model": "QuantModel",
    "sparsebit.quantization.quant_config": "_C parse_qconfig verify_bits verify_backend verify_schedule",
    "sparsebit.quantization.quant_tracer": "QTracer",
    "sparsebit.quantization.common": "Granularity QuantTarget Backend get_backend get_qscheme",
    "sparsebit.quantization.modules": (
        "QMODULE_MAP register_qmodule QuantOpr MultipleInputsQuantOpr PASSTHROUGHT_MODULES "
        "QReLU QReLU6 QLeakyReLU QSigmoid QSiLU QGELU QMish QHardSigmoid QTanh QConv2d QConvTranspose2d QLinear "
        "QEmbedding QBatchNorm2d QLayerNorm QMean QAvgPool2d QAdaptiveAvgPool2d QSoftmax QIdentity QUpsample "
        "QInterpolate QAdd MatMul QSubtract QMul QDivide QFloorDiv QGetAttr QGetItem QEqual MaxPool2d QBatchNorm1d "
        "Flatten Size Reshape Concat Expand Expand_as Transpose Permute Split Dropout Clone Contiguous Detach Where "
        "StochasticDepth"
    ),
    "sparsebit.quantization.modules.unary": "QIdentity",
    "sparsebit.quantization.modules.math": "QAdd",
    "sparsebit.quantization.observers": "OBSERVERS_MAP register_observer Observer build_observer",
    "sparsebit.quantization.observers.base": "Observer DataCache",
    "sparsebit.quantization.quantizers": "QUANTIZERS_MAP register_quantizer Quantizer build_quantizer",
    "sparsebit.quantization.quantizers.quant_descriptor": "QuantDescriptor",
    "sparsebit.quantization.quantizers.quant_tensor": (
        "STE MySTE ort_fake_quant trt_fake_quant torch_fake_quant ort_dqrange trt_dqrange fake_quant_factory "
        "fake_qrange_factory"
    ),
    "sparsebit.quantization.quantizers.adaround": "reconstruct_qlayer LinearTempDecay",
    "sparsebit.quantization.quantizers.lsq": "gs_scaling",
    "sparsebit.quantization.tools": (
        "QuantizationErrorProfiler SharedData fx_symbolic_trace to_detach to_cpu CalibrationRunner"
    ),
    "sparsebit.quantization.tools.graph_wrapper": "GraphVisitor",
    "sparsebit.quantization.tools.tensor_wrapper": "to_device",
    "sparsebit.quantization.converters": "simplify fuse_operations",
    "sparsebit.quantization.converters.prune": "PruneGraph",
    "sparsebit.quantization.converters.utils": "MatchingNode InputMatchingType SubgraphMatcher ReplacePatternBase",
    "sparsebit.quantization.converters.utils.subgraph_matching_utils": (
        "SubgraphMatchingTimer ReplaceStrategyBase ReplaceStrategy recursive_getattr get_operators_type get_operators"
    ),
    "sparsebit.quantization.converters.utils.dominator_tree": "DominatorTree",
    "sparsebit.quantization.converters.utils.disjoint_set_union": "DSU",
    "sparsebit.quantization.converters.utils.bitpartite_graph_matching": "Hungary",
    "sparsebit.sparse": "SparseModel parse_sconfig",
    "sparsebit.sparse.sparse_config": "_C parse_sconfig",
    "sparsebit.sparse.modules": "SMODULE_MAP register_smodule SparseOpr SConv2d SLinear SBatchNorm2d",
    "sparsebit.sparse.sparsers": "SPARSERS_MAP register_sparser Sparser build_sparser",
    "sparsebit.sparse.sparsers.l1norm": "Sparser",
    "sparsebit.utils": "update_config check_torch_version",
    "sparsebit.utils.yaml_utils": "_parse_config",
}

SOURCES = [
    "nn.ReLU",
    "F.relu",
    "nn.ReLU6",
    "F.relu6",
    "nn.LeakyReLU",
    "F.leaky_relu",
    "nn.Sigmoid",
    "torch.sigmoid",
    "F.sigmoid",
    "nn.SiLU",
    "F.silu",
    "nn.GELU",
    "F.gelu",
    "nn.Mish",
    "F.mish",
    "nn.Hardsigmoid",
    "F.hardsigmoid",
    "nn.Tanh",
    "nn.Conv2d",
    "nn.ConvTranspose2d",
    "nn.Linear",
    "nn.Embedding",
    "nn.BatchNorm2d",
    "nn.LayerNorm",
    "torch.mean",
    "torch.Tensor.mean",
    "nn.AvgPool2d",
    "nn.AdaptiveAvgPool2d",
    "F.adaptive_avg_pool2d",
    "nn.Softmax",
    "torch.Tensor.softmax",
    "F.softmax",
    "nn.Identity",
    "nn.Upsample",
    "F.interpolate",
    "operator.add",
    "torch.add",
    "operator.matmul",
    "torch.matmul",
    "operator.sub",
    "torch.subtract",
    "operator.mul",
    "torch.mul",
    "operator.truediv",
    "torch.div",
    "operator.floordiv",
    "torch.floor_divide",
    "getattr",
    "operator.getitem",
    "operator.eq",
    "nn.MaxPool2d",
    "nn.BatchNorm1d",
    "torch.flatten",
    "torch.Tensor.flatten",
    "nn.Flatten",
    "torch.Tensor.size",
    "torch.reshape",
    "torch.Tensor.reshape",
    "torch.Tensor.view",
    "torch.cat",
    "torch.Tensor.expand",
    "torch.Tensor.expand_as",
    "torch.transpose",
    "torch.Tensor.transpose",
    "torch.permute",
    "torch.Tensor.permute",
    "torch.split",
    "nn.Dropout",
    "torch.Tensor.clone",
    "torch.Tensor.contiguous",
    "torch.Tensor.detach",
    "torch.where",
]


@pytest.mark.parametrize("path", IMPORTS)
def test_import_paths(path):
    module = importlib.import_module(path)
    missing = [name for name in IMPORTS[path].split() if not hasattr(module, name)]
    assert not missing, f"{path} lacks {missing}"
    modules = [name for name in IMPORTS[path].split() if inspect.ismodule(getattr(module, name))]
    assert not modules, f"{path}: {modules} must be functions or classes, a sub-package hides them"


@pytest.mark.parametrize("source", SOURCES)
def test_sources_of_the_original_are_registered(source):
    import operator

    import torch.nn.functional as F

    from sparsebit.quantization.modules import QMODULE_MAP

    assert QMODULE_MAP[eval(source, {"nn": nn, "F": F, "torch": torch, "operator": operator})]


def test_star_import_of_modules():
    scope: dict[str, object] = {}
    exec("from sparsebit.quantization.modules import *", scope)
    assert "QConv2d" in scope and "QMODULE_MAP" in scope


SIGNATURES = {
    "__init__": ["self", "model", "config"],
    "prepare_calibration": ["self"],
    "calc_qparams": ["self", "asym", "w_quant", "a_quant"],
    "init_QAT": ["self"],
    "set_quant": ["self", "w_quant", "a_quant"],
    "batchnorm_tuning": ["self"],
    "get_quantization_error": ["self", "data", "checker", "is_async"],
    "export_onnx": [
        *(
            "self",
            "dummy_data",
            "name",
            "input_names",
            "output_names",
            "dynamic_axes",
            "opset_version",
            "verbose",
        ),
        "extra_info",
    ],
    "add_extra_info_to_onnx": ["self", "onnx_path"],
    "dump_mermaid": ["self", "f"],
}


@pytest.mark.parametrize("method", SIGNATURES)
def test_signatures(method):
    from sparsebit.quantization import QuantModel

    have = list(inspect.signature(getattr(QuantModel, method)).parameters)
    assert have[: len(SIGNATURES[method])] == SIGNATURES[method]


YAML = """
BACKEND: virtual
SCHEDULE: {FUSE_BN: True}
W: {QSCHEME: per-channel-symmetric, QUANTIZER: {TYPE: uniform, BIT: 8}, OBSERVER: {TYPE: MINMAX}}
A: {QSCHEME: per-tensor-affine, QUANTIZER: {TYPE: uniform, BIT: 8}, OBSERVER: {TYPE: MINMAX, LAYOUT: NCHW}}
"""


@pytest.fixture
def config(tmp_path):
    from sparsebit.quantization import parse_qconfig

    path = tmp_path / "qconfig.yaml"
    path.write_text(YAML)
    return parse_qconfig(str(path))


def test_the_classic_sequence(config):
    from sparsebit.quantization import QuantModel

    net, batches = small_net(), images()
    qmodel = QuantModel(net, config=config).to(config.DEVICE)
    qmodel.eval()
    qmodel.prepare_calibration()
    with torch.no_grad():
        for x in batches:
            qmodel(x.to(config.DEVICE))
    qmodel.calc_qparams()
    qmodel.set_quant(w_quant=True, a_quant=True)
    with torch.no_grad():
        out, want = qmodel(batches[0]), net(batches[0])
    assert 0 < (out - want).abs().max() < 0.1 * want.abs().max()
    assert qmodel.model.conv1 is qmodel.model.conv1_bn  # the original renames a folded layer
    qmodel.model.fc.input_quantizer.set_bit(bit=4)
    qmodel.model.fc.weight_quantizer.set_fake_fused()
    assert "conv1" in dict(qmodel.model.named_modules())
    with torch.no_grad():
        assert not torch.equal(qmodel(batches[0]), out)
    assert list(qmodel.parameters()) and "QConv2d" in str(qmodel.model)
    text = io.StringIO()
    qmodel.dump_mermaid(text)
    assert text.getvalue().startswith("graph TD") and "layer1_0_conv1" in text.getvalue()


def test_checkpoint_keys(config):
    from sparsebit.quantization import QuantModel

    qmodel = QuantModel(small_net(), config).calibrate(images())
    keys = set(qmodel.state_dict())
    for key in ("weight", "bias", "weight_quantizer.scale", "input_quantizer.zero_point"):
        assert f"model.layer1_0_conv1.{key}" in keys
    for key in ("min_val", "max_val"):
        assert f"model.layer1_0_conv1.input_quantizer.observer.{key}" in keys


def test_default_config_verbs():
    from sparsebit.quantization.quant_config import _C as default_config
    from sparsebit.quantization.quant_model import QuantModel

    config = default_config.clone()
    config.defrost()
    config.DEVICE = "cpu"
    config.merge_from_list(
        ["W.QSCHEME", "per-channel-symmetric", "W.QUANTIZER.BIT", 4, "A.QSCHEME", "per-tensor-affine"]
    )
    config.freeze()
    assert config.W.QUANTIZER.BIT == 4 and config.SCHEDULE.BN_TUNING is False
    assert QuantModel(small_net(), config).model.fc.weight_quantizer.bit == 4
    assert default_config.W.QUANTIZER.BIT == 8  # the default is untouched


def test_configs_can_be_indexed(config):
    assert config["W"]["QUANTIZER"]["BIT"] == 8


def test_fuse_operations_on_its_own(config):
    """Old scripts run the fuse passes themselves; `custom_lists` names the ones to run, whatever the schedule says."""
    from sparsebit.quantization import QuantModel
    from sparsebit.quantization.converters import fuse_operations

    qmodel = QuantModel(small_net(), config.override("SCHEDULE.FUSE_BN", False))
    assert any("BatchNorm" in type(m).__name__ for m in qmodel.model.modules())
    fuse_operations(qmodel.model, qmodel.cfg.SCHEDULE, custom_lists=["fuse_bn"])
    assert not any("BatchNorm" in type(m).__name__ for m in qmodel.model.modules())
    torch.testing.assert_close(qmodel(images()[0]), small_net()(images()[0]), rtol=1e-4, atol=1e-5)


def test_enums():
    from sparsebit.quantization.common import Backend, Granularity, QuantTarget, get_backend, get_qscheme

    assert (Granularity.LAYERWISE.value, Granularity.CHANNELWISE.value) == (0, 1)
    assert (QuantTarget.WEIGHT.value, QuantTarget.FEATURE.value) == (0, 1)
    assert [Backend.VIRTUAL.value, Backend.ONNXRUNTIME.value, Backend.TENSORRT.value] == [0, 1, 2]
    assert get_backend("tensorrt") is Backend.TENSORRT
    assert get_qscheme("per-channel-symmetric") == torch.per_channel_symmetric


def test_pruning_by_the_old_calls():
    from sparsebit.sparse import SparseModel, parse_sconfig

    config = parse_sconfig({"SPARSER": {"TYPE": "structed", "STRATEGY": "l1norm", "RATIO": 0.5}})
    smodel = SparseModel(small_net(), config)
    smodel.calc_params()
    assert smodel(torch.randn(2, 3, 8, 8)).shape == (2, 10)
