"""One test per defect of the original that post-training quantization must not bring back (SPARSEBIT.md part 2).

Others stand beside the code they belong to: D1 with batch-norm tuning; D2, D6, D9, D23, D37 with the observers; D4, D5,
D25, D26, D27 with the export; D11, D28, D38 with the config; D22, D35, D41 with the graph.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import subprocess
import sys

import pytest
import torch
from torch import nn

import sparsebit
from models import images, small_net, sqnr
from sparsebit.errors import CalibrationError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.quantizers import build_quantizer


def config(*overrides):
    return sparsebit.QuantConfig.load({"BACKEND": "virtual", "SCHEDULE": {"FUSE_BN": True}}).override(
        *overrides
    )


def scales(qmodel):
    return {name: q.scale.clone() for name, q in qmodel.named_quantizers()}


def test_D3_asym_observes_behind_quantized_predecessors():
    """At 2 bits the inputs of later layers differ; the first input does not."""
    cfg = config("W.QUANTIZER.BIT", 2, "A.QUANTIZER.BIT", 2)
    plain = scales(QuantModel(small_net(), cfg).calibrate(images()))
    asym = scales(QuantModel(small_net(), cfg).calibrate(images(), asym=True))
    assert torch.equal(plain["conv1.input_quantizer"], asym["conv1.input_quantizer"])
    assert not torch.equal(plain["fc.input_quantizer"], asym["fc.input_quantizer"])


def test_D3_asym_equals_calibrating_layer_by_layer_by_hand():
    """The definition, spelled out: quantize everything before a layer, observe what reaches it."""
    cfg = config("W.QUANTIZER.BIT", 3, "A.QUANTIZER.BIT", 3, "SCHEDULE.FUSE_BN", True)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)
    ).eval()
    batches = images()
    got = scales(QuantModel(net, cfg).calibrate(batches, asym=True))
    by_hand = QuantModel(net, cfg).calibrate(batches)
    for layer in ("_0", "_2", "_4"):
        module = getattr(by_hand.model, layer)
        seen = []
        handle = module.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0].clone()))
        with torch.no_grad():
            for x in batches:
                by_hand(x)
        handle.remove()
        whole = torch.cat(seen)
        module.input_quantizer.calc_qparams_with_minmax(whole.min(), whole.max())
        torch.testing.assert_close(module.input_quantizer.scale, got[f"{layer}.input_quantizer"])
        module.set_quant(True, True)


def test_D3_asym_works_after_plain_forwards():
    """Old scripts ask for asym only in calc_qparams."""
    cfg = config("W.QUANTIZER.BIT", 2, "A.QUANTIZER.BIT", 2)
    qmodel = QuantModel(small_net(), cfg)
    qmodel.prepare_calibration()
    with torch.no_grad():
        for x in images():
            qmodel(x)
    qmodel.calc_qparams(asym=True, w_quant=True, a_quant=True)
    want = scales(QuantModel(small_net(), cfg).calibrate(images(), asym=True))
    assert all(torch.equal(want[name], scale) for name, scale in scales(qmodel).items())


@pytest.mark.parametrize("groups", [1, 2])
def test_D10_transposed_convolution_has_one_scale_per_output_channel(groups):
    net = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=groups)).eval()
    with torch.no_grad():
        net[0].weight[:, 1] *= 100  # one output channel is large; the others must not suffer
    x = torch.randn(2, 4, 5, 5)
    qmodel = sparsebit.quantize(net, [x], config("A.QUANTIZER.DISABLE", True))
    assert qmodel.model._0.weight_quantizer.scale.shape == (6 // groups,)
    with torch.no_grad():
        want, got = net(x), qmodel(x)
    assert all(sqnr(want[:, c], got[:, c]) > 35 for c in range(6))


def test_D12_set_quant_before_calibration_is_refused():
    qmodel = QuantModel(small_net(), config())
    with pytest.raises(CalibrationError, match=r"conv1\.\w+_quantizer has no scale yet. Calibrate first"):
        qmodel.set_quant(True, True)
    qmodel.set_quant(False, False)


def test_D13_an_op_with_the_same_value_twice_is_quantized():
    class Twice(nn.Module):
        def forward(self, x):
            return torch.matmul(x, x) + (x + x)

    qmodel = QuantModel(Twice(), config("A.QADD.ENABLE_QUANT", True))
    names = dict(qmodel.named_quantizers())
    assert "matmul_identity0.input_quantizer" in names and "add_identity0.input_quantizer" in names
    x = torch.randn(3, 4, 4)
    qmodel = sparsebit.quantize(Twice(), [x], config("A.QADD.ENABLE_QUANT", True, "A.QUANTIZER.BIT", 2))
    assert sqnr(Twice()(x), qmodel(x)) < 20  # it does round


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: the model stays where it was put")
def test_D14_a_model_on_the_cpu_of_a_gpu_machine():
    sparsebit.quantize(small_net(), images())(images()[0])


def test_D14_quantizers_follow_the_model_not_the_machine():
    """On every device: nothing is created on a device of its own choice."""
    qmodel = QuantModel(small_net(), config("DEVICE", "cpu")).to("meta")
    assert {t.device.type for t in qmodel.state_dict().values()} == {"meta"}


def test_D21_the_users_model_is_not_touched():
    net = small_net()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    flags = [m.training for m in net.modules()]
    qmodel = sparsebit.quantize(net, images())
    mine = {p.data_ptr() for p in net.parameters()}
    assert not mine & {p.data_ptr() for p in qmodel.parameters()}
    with torch.no_grad():
        for p in qmodel.parameters():
            p.add_(1.0)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert flags == [m.training for m in net.modules()] and not hasattr(net.conv1, "input_quantizer")
    assert net.layer1[0].relu.inplace  # functionalize works on the copy


def test_D22_unused_inputs_stay_in_the_signature():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, a, b, scale=2.0):
            return self.fc(a)

    x = torch.randn(3, 4)
    qmodel = sparsebit.quantize(Unused(), [(x, x)])
    assert qmodel(x, None).shape == qmodel(a=x, b=x, scale=1).shape == (3, 2)


def test_D29_a_calibrated_state_dict_loads_into_a_fresh_model():
    cfg = config("A.QSCHEME", "per-channel-affine")
    qmodel = sparsebit.quantize(small_net(), images(), cfg)
    fresh = QuantModel(small_net(), cfg)
    fresh.load_state_dict(qmodel.state_dict())
    fresh.set_quant(True, True)
    fresh.eval()
    assert torch.equal(fresh(images()[0]), qmodel(images()[0]))


def test_D29_old_shapes_of_scales_load():
    qmodel = sparsebit.quantize(small_net(), images(), config())
    state = qmodel.state_dict()
    state["model.conv1.weight_quantizer.scale"] = state["model.conv1.weight_quantizer.scale"].reshape(
        -1, 1, 1, 1
    )
    state["model.conv1.input_quantizer.scale"] = state["model.conv1.input_quantizer.scale"].reshape(
        1, 1, 1, 1
    )
    fresh = QuantModel(small_net(), config())
    fresh.load_state_dict(state)
    assert fresh.model.conv1.weight_quantizer.scale.shape == (8,)


@pytest.mark.parametrize("layout", ["NCHW", "NLC"])
@pytest.mark.parametrize("scheme", ["per-tensor-affine", "per-channel-affine"])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 4, 6)])
def test_D30_activations_of_any_rank(shape, scheme, layout):
    cfg = config("A.QSCHEME", scheme, "A.OBSERVER.LAYOUT", layout)
    x = torch.randn(shape)
    net = nn.Sequential(nn.Linear(6, 3)).eval()
    qmodel = sparsebit.quantize(net, [x], cfg)
    with torch.no_grad():
        assert sqnr(net(x), qmodel(x)) > 30


def test_D31_ch_axis_of_a_quantizer():
    cfg = config()
    assert build_quantizer(cfg.w).ch_axis == 0
    assert build_quantizer(cfg.a).ch_axis == 1
    assert build_quantizer(cfg.override("A.OBSERVER.LAYOUT", "NLC").a).ch_axis == 2


def test_D39_the_package_installs_with_its_data():
    from sparsebit.quantization.presets import presets

    assert importlib.metadata.version("sparsebit") == sparsebit.__version__  # installed, not just on the path
    assert "w8a8" in presets() and (importlib.resources.files("sparsebit") / "py.typed").is_file()


def test_D40_import_needs_no_torchvision_and_compiles_nothing():
    code = (
        "import sys; sys.modules['torchvision'] = None; sys.modules['scipy'] = None\n"
        "import torch.multiprocessing as mp; before = mp.get_sharing_strategy()\n"
        "import sparsebit.quantization.quant_model, sparsebit.quantization.quantizers.quant_tensor\n"
        "assert 'torch.utils.cpp_extension' not in sys.modules and mp.get_sharing_strategy() == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_D47_calibration_out_of_order_says_what_to_do():
    qmodel = QuantModel(small_net(), config())
    with pytest.raises(CalibrationError, match=r"call prepare_calibration\(\)"):
        qmodel.calc_qparams()
    qmodel.prepare_calibration()
    with pytest.raises(CalibrationError, match="no calibration data"):
        qmodel.calc_qparams()
    with torch.no_grad():
        qmodel(images()[0])
    qmodel.calc_qparams()
    with pytest.raises(CalibrationError, match="once"):
        qmodel.calc_qparams()
    with pytest.raises(CalibrationError, match="`batches` is empty"):
        sparsebit.quantize(small_net(), [])


@pytest.mark.parametrize("asym", [False, True])
def test_D32_a_parameter_of_a_nested_module_used_directly(asym):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 4))
            self.fc = nn.Linear(4, 4)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner.fc(x + self.inner.token)

    net, x = Net(), torch.randn(6, 4)
    qmodel = sparsebit.quantize(net, [x], asym=asym)
    assert sqnr(net(x), qmodel(x)) > 25


@pytest.mark.parametrize("asym", [False, True])
def test_D34_inputs_inside_a_list_and_by_keyword_are_calibrated(asym):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, a, b):
            return self.fc(torch.cat([a, b], dim=1))

    net, batch = Net(), {"b": torch.randn(6, 4) * 3, "a": torch.randn(6, 4)}
    qmodel = sparsebit.quantize(net, [batch], asym=asym)
    both = torch.cat([batch["a"], batch["b"]], 1)
    torch.testing.assert_close(
        qmodel.model.fc.input_quantizer.scale * 255, (both.max() - both.min()).reshape(1), rtol=0.02, atol=0
    )
    assert sqnr(net(**batch), qmodel(**batch)) > 25


@pytest.mark.parametrize(
    "w, a", [("lsq", "lsq"), ("lsq+", "lsq+"), ("dorefa", "pact"), ("uniform", "uniform")]
)
def test_D24_training_works_on_the_cpu(w, a):
    """The original had no backward pass there: every gradient is there, and three steps bring the loss down."""
    types = ("W.QUANTIZER.TYPE", w, "A.QUANTIZER.TYPE", a, "W.QUANTIZER.BIT", 4, "A.QUANTIZER.BIT", 4)
    qmodel = QuantModel(small_net(), config(*types)).calibrate(images())
    qmodel.init_QAT()
    qmodel.train()
    assert {p.device.type for p in qmodel.parameters()} == {"cpu"}
    optimizer = torch.optim.SGD(qmodel.qat_parameter_groups(0.1), momentum=0.9)
    x, losses = images()[0], []
    for _ in range(4):
        loss = qmodel(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    missing = [name for name, p in qmodel.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing and losses[-1] < losses[0]


def test_D27_lsq_plus_takes_every_scheme_and_keeps_its_parameters():
    """The original could assign no learned zero point: a calibration replaced a Parameter by a tensor."""
    for scheme in (f"per-{per}-{kind}" for per in ("tensor", "channel") for kind in ("affine", "symmetric")):
        types = [v for x in "WA" for v in (f"{x}.QUANTIZER.TYPE", "lsq+", f"{x}.QSCHEME", scheme)]
        qmodel = QuantModel(small_net(), config(*types)).calibrate(images())
        quantizer = qmodel.calibrate(images()).model.conv1.weight_quantizer
        assert isinstance(quantizer.scale, nn.Parameter)
        assert isinstance(quantizer.zero_point, nn.Parameter) == scheme.endswith("affine")
