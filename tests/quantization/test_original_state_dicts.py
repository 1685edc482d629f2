"""State dicts that the original wrote: its names, its shapes, its quantizers. `written_by_the_original` makes them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models import Attention, images, randomise, small_net
from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.quantizers import Quantizer

FUSED = {"BACKEND": "virtual", "SCHEDULE": {"FUSE_BN": True}}
INFINITE = {"observer.min_val": torch.tensor(float("-inf")), "observer.max_val": torch.tensor(float("inf"))}
NO_DATA = {"scale": torch.ones(1), "zero_point": torch.zeros(1), **INFINITE}


def config(w="uniform", a="uniform", bit=8, a_scheme="per-tensor-affine", **sections):
    return parse_qconfig(
        {
            "BACKEND": "virtual",
            **sections,
            "W": {"QSCHEME": "per-channel-symmetric", "QUANTIZER": {"TYPE": w, "BIT": bit}},
            "A": {"QSCHEME": a_scheme, "QUANTIZER": {"TYPE": a, "BIT": bit}},
        }
    )


def calibrated(net, cfg, batches=None):
    qmodel = QuantModel(net, cfg)
    qmodel.calibrate(images() if batches is None else batches)
    qmodel.set_quant(w_quant=True, a_quant=True)
    return qmodel


def written_by_the_original(qmodel, folded=False):
    """The state dict that the original would have written for the same model with the same scales."""
    state = {}
    for name, module in qmodel.model.named_modules():
        if not isinstance(module, QuantOpr):
            continue
        there = f"model.{name}_bn" if folded and hasattr(qmodel.model, f"{name}_bn") else f"model.{name}"
        held = f"{there}.module" if isinstance(module, nn.BatchNorm2d) else there
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                state[f"{held}.{key}"] = value.detach().clone()
        state.update(grid_of(f"{there}.input_quantizer", module.input_quantizer, 4))
        if module.weight is not None and not isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
            state.update(grid_of(f"{there}.weight_quantizer", module.weight_quantizer, module.weight.dim()))
    return state


def grid_of(prefix, quantizer, dims):
    """Entries of one quantizer; of one that we do not have, because we keep its value in float, as well."""
    if quantizer is not None and quantizer.absorbed:
        return {f"{prefix}.{key}": value for key, value in NO_DATA.items()}
    if quantizer is None:
        entries = {"scale": torch.tensor([0.1]), "zero_point": torch.tensor([3.0])}
        entries |= {"observer.min_val": torch.tensor(-0.3), "observer.max_val": torch.tensor(0.7)}
    else:
        entries = dict(quantizer.state_dict())
        for key in ("shift", "plain"):
            entries.pop(key, None)
    for key in ("scale", "zero_point"):
        entries[key] = entries[key].reshape(-1, *[1] * (dims - 1))
    return {f"{prefix}.{key}": value.clone() for key, value in entries.items()}


def outputs(qmodel, x):
    qmodel.eval()
    qmodel.set_quant(w_quant=True, a_quant=True)
    with torch.no_grad():
        return qmodel(x)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "w, a", [("uniform", "uniform"), ("lsq", "lsq"), ("dorefa", "pact"), ("lsq+", "lsq+")]
)
def test_a_state_dict_of_the_original_loads_strictly(w, a, fused, caplog):
    net, x = small_net(), images()[0]
    cfg = config(w, a, bit=4, a_scheme="per-tensor-affine", **(FUSED if fused else {}))
    qmodel = calibrated(net, cfg)
    state = written_by_the_original(qmodel, folded=fused)
    if fused:
        assert "model.conv1_bn.weight_quantizer.scale" in state
    else:
        assert state["model.conv1.weight_quantizer.scale"].shape == (8, 1, 1, 1)
        assert "model.bn1.module.running_mean" in state and "model.bn1.weight" not in state
    fresh = QuantModel(randomise(copy.deepcopy(net), seed=7), cfg)
    kept = {key: value.clone() for key, value in state.items()}
    assert str(fresh.load_state_dict(state)) == "<All keys matched successfully>"
    assert all(
        torch.equal(state[key], value) for key, value in kept.items()
    )  # the user's dict stays the same
    if a != "lsq":  # see below: the sign of its codes is not in the file
        torch.testing.assert_close(outputs(fresh, x), outputs(qmodel, x))
    lines = [r.message for r in caplog.records if "not used here" in r.message]
    assert len(lines) == (0 if fused else 1)
    assert fused or ("bn1.input_quantizer" in lines[0] and "layer1_1_bn2.input_quantizer" in lines[0])


def test_our_own_state_dicts_load_as_before(caplog):
    net, x = small_net(), images()[0]
    qmodel = calibrated(net, config(**FUSED))
    fresh = QuantModel(net, config(**FUSED))
    fresh.load_state_dict(qmodel.state_dict())
    torch.testing.assert_close(outputs(fresh, x), outputs(qmodel, x))
    assert not caplog.records
    state = qmodel.state_dict()
    del state["model.fc.input_quantizer.scale"]
    with pytest.raises(RuntimeError, match=r"Missing key.*fc\.input_quantizer\.scale"):
        fresh.load_state_dict(state)
    state = {**qmodel.state_dict(), "model.add_identity0.input_quantizer.scale": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*add_identity0"):
        fresh.load_state_dict(state)


@pytest.mark.parametrize(
    "key",
    [
        "model.nothing.weight",
        "model.nothing.input_quantizer.scale",
        "model.nothing_identity0.input_quantizer.scale",
        "model.conv1.input_quantizer.beta",
        "model.conv1.input_quantizer.alpha",
        "model.conv1.other.weight",
        "model.bn1.other",
        "other",
    ],
)
def test_unknown_keys_are_refused(key):
    net = small_net()
    qmodel = calibrated(net, config())
    state = {**written_by_the_original(qmodel), key: torch.ones(1)}
    with pytest.raises(RuntimeError, match=rf"Unexpected key\(s\) in state_dict: \"{key}\"\."):
        QuantModel(net, config()).load_state_dict(state)
    QuantModel(net, config()).load_state_dict(state, strict=False)


def test_a_missing_weight_is_refused():
    net = small_net()
    state = written_by_the_original(calibrated(net, config()))
    del state["model.fc.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*\"model\.fc\.weight\"\."):
        QuantModel(net, config()).load_state_dict(state)


def test_folded_and_not_folded_do_not_mix():
    net = small_net()
    plain, fused = calibrated(net, config()), calibrated(net, config(**FUSED))
    with pytest.raises(RuntimeError, match=r"build it with SCHEDULE\.FUSE_BN: True"):
        plain.load_state_dict(written_by_the_original(fused, folded=True))
    with pytest.raises(RuntimeError, match=r"build it with SCHEDULE\.FUSE_BN: False"):
        fused.load_state_dict(written_by_the_original(plain))


def test_leftovers_of_folded_norms_are_no_harm():
    net, x = small_net(), images()[0]
    qmodel = calibrated(net, config(**FUSED))
    leftovers = written_by_the_original(calibrated(net, config()))
    state = {**leftovers, **written_by_the_original(qmodel, folded=True)}
    assert {"model.conv1.weight", "model.conv1_bn.weight", "model.bn1.module.weight"} <= set(state)
    fresh = QuantModel(net, config(**FUSED))
    fresh.load_state_dict(state)
    torch.testing.assert_close(outputs(fresh, x), outputs(qmodel, x))
    with pytest.raises(RuntimeError, match=r"FUSE_BN: True"):
        QuantModel(net, config()).load_state_dict(state)


def test_what_the_original_did_not_quantize_stays_float(caplog):
    """An absorbed quantizer has scale 1 there; here it may be active, and 1 would be wrong in silence."""
    net, x = small_net(), images()[0]
    qmodel = calibrated(net, config())
    state = written_by_the_original(qmodel)
    state.update({f"model.pool.input_quantizer.{key}": value for key, value in NO_DATA.items()})
    for key in [key for key in state if key.startswith("model.fc.input_quantizer")]:
        del state[key]
    fresh = QuantModel(net, config())
    fresh.load_state_dict(state)
    for name in ("pool", "fc"):
        qmodel.model.get_submodule(name).input_quantizer.set_fake_fused()
        assert fresh.model.get_submodule(name).input_quantizer.unused
    torch.testing.assert_close(outputs(fresh, x), outputs(qmodel, x))
    line = next(r.message for r in caplog.records if "had no scale there" in r.message)
    assert "2 quantizers" in line and "pool.input_quantizer" in line and "fc.input_quantizer" in line
    fresh.calibrate(images())  # a new calibration gives them their scales
    assert fresh.model.fc.input_quantizer.scale > 0


def test_a_state_dict_from_before_calibration():
    net = small_net()
    state = written_by_the_original(calibrated(net, config()))
    for key in [key for key in state if "_quantizer." in key]:
        state[key] = NO_DATA[key.partition("_quantizer.")[2]]
    fresh = QuantModel(net, config())
    fresh.load_state_dict(state)
    with pytest.raises(RuntimeError, match="has no scale yet"):
        fresh.set_quant(w_quant=True, a_quant=True)
    fresh.set_quant(False, False)
    torch.testing.assert_close(fresh(images()[0]), net(images()[0]), rtol=1e-4, atol=1e-5)


def test_adaround_keeps_its_choices():
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).eval(),
        torch.randn(8, 3, 8, 8),
    )
    cfg = config("adaround", bit=3)
    qmodel = calibrated(net, config("uniform", bit=3), [x])
    state = written_by_the_original(qmodel)
    want = {}
    for name, module in qmodel.model.named_modules():
        if isinstance(module, QuantOpr) and module.weight is not None:
            v = state[f"model.{name}.weight_quantizer.v"] = torch.randn_like(module.weight)
            scale = state[f"model.{name}.weight_quantizer.scale"]
            want[name] = ((module.weight / scale).floor() + (v >= 0)).clamp(-4, 3) * scale
    fresh = QuantModel(net, cfg)
    fresh.load_state_dict(state)
    fresh.set_quant(w_quant=True, a_quant=True)
    assert len(want) == 2
    for name, value in want.items():
        layer = fresh.model.get_submodule(name)
        torch.testing.assert_close(layer.weight_quantizer(layer.weight), value)


def test_pact_keeps_its_bound():
    net, x = small_net(), images()[0]
    cfg = config("dorefa", "pact", bit=4)
    qmodel = calibrated(net, cfg)
    state = written_by_the_original(qmodel)
    for i, name in enumerate(key for key in state if key.endswith(".alpha")):
        state[name] = torch.tensor(0.5 + 0.1 * i)  # without dimensions
    fresh = QuantModel(net, cfg)
    fresh.load_state_dict(state)
    assert fresh.model.conv1.input_quantizer.alpha.item() == pytest.approx(0.5)
    outputs(fresh, x)


def test_the_sign_of_learned_scales(caplog):
    """lsq of the original changed an affine scheme to a symmetric one where values were negative."""
    net, batches = small_net(), images()
    cfg = config("lsq", "lsq", bit=4)
    state = written_by_the_original(calibrated(net, cfg))
    for key in [key for key in state if "input_quantizer.zero_point" in key]:
        state[key] = torch.zeros_like(state[key])
    resumed = calibrated(net, cfg)  # as the original's users had to
    resumed.load_state_dict(state)
    assert resumed.model.conv1.input_quantizer.is_symmetric  # images
    assert not resumed.model.layer1_0_conv1.input_quantizer.is_symmetric  # behind a ReLU
    assert "does not tell whether" not in caplog.text
    fresh = QuantModel(net, cfg)
    fresh.load_state_dict(state)
    assert "conv1.input_quantizer: the state dict does not tell whether" in caplog.text
    outputs(fresh, batches[0])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.embed, self.attention, self.norm = nn.Embedding(10, 16), Attention(), nn.LayerNorm(16)
        self.shared, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, index):
        x = self.embed(index)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = self.shared(F.gelu(self.shared(self.attention(x))))
        return self.head(self.norm(x).mean(1))


def test_a_transformer_with_a_layer_that_is_called_twice(caplog):
    torch.manual_seed(0)
    net, index = Transformer().eval(), torch.randint(10, (4, 5))
    cfg = config()
    qmodel = calibrated(net, cfg, [index])
    state = written_by_the_original(qmodel)
    state["model.token"] = qmodel.model.token.detach().clone()
    for key in [key for key in state if key.startswith("model.shared.")]:
        state[key.replace("shared", "shared_1")] = state[key]  # one module per call there
    for key in NO_DATA:  # inputs of an add, which are float here
        state[f"model.add_identity0.input_quantizer.{key}"] = torch.full((1, 1, 1), 0.1)
    assert "model.norm.input_quantizer.scale" in state and "model.embed.input_quantizer.scale" in state
    fresh = QuantModel(copy.deepcopy(net), cfg)
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    fresh.load_state_dict(state)
    torch.testing.assert_close(outputs(fresh, index), outputs(qmodel, index))
    line = next(r.message for r in caplog.records if "not used here" in r.message)
    assert "add_identity0" in line and "norm.input_quantizer" in line and "embed.input_quantizer" in line


def test_norms_that_an_op_held_under_another_name():
    torch.manual_seed(0)
    net, index = Transformer().eval(), torch.randint(10, (4, 5))
    qmodel = calibrated(net, config(), [index])
    state = written_by_the_original(qmodel)
    state["model.token"] = qmodel.model.token.detach().clone()
    for name in ("norm", "attention_norm"):
        for key in ("weight", "bias"):
            state[f"model.{name}.layernorm.{key}"] = state.pop(f"model.{name}.{key}")
    fresh = QuantModel(net, config())
    fresh.load_state_dict(state)
    torch.testing.assert_close(outputs(fresh, index), outputs(qmodel, index))


def test_a_skipped_layer_is_found_under_its_fx_name():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.ReLU())])
            self.fc = nn.Linear(6, 2)

        def forward(self, x):
            return self.fc(self.blocks[0](x))

    net, x = Outer().eval(), torch.randn(4, 6)
    cfg = config(SKIP_TRACE_MODULES=["blocks.0"])
    qmodel = calibrated(net, cfg, [x])
    state = written_by_the_original(qmodel)
    for key, value in net.blocks[0].state_dict().items():
        state[f"model.blocks_0.{key}"] = value + 1
    fresh = QuantModel(net, cfg)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.model.get_submodule("blocks.0")[0].weight, net.blocks[0][0].weight + 1)


def test_through_a_wrapper_and_a_copy():
    net, x = small_net(), images()[0]
    qmodel = calibrated(net, config())
    state, want = written_by_the_original(qmodel), outputs(qmodel, x)

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    wrapped = Wrapper(QuantModel(net, config()))
    wrapped.load_state_dict({f"module.{key}": value for key, value in state.items()})
    twin = copy.deepcopy(QuantModel(net, config()))
    twin.load_state_dict(state)
    for found in (wrapped.module, twin):
        torch.testing.assert_close(outputs(found, x), want)
    assert not any(isinstance(m, Quantizer) and m.unused for m in twin.modules())
