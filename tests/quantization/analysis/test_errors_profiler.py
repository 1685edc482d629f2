"""Per-layer errors against errors computed by hand with forward hooks; every kind of model and data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsebit
from models import Attention, images, small_net, sqnr
from sparsebit.errors import CalibrationError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.quantizers import Quantizer
from sparsebit.quantization.tools import QuantizationErrorProfiler

X = images(3)
W4A4 = {"BACKEND": "virtual", "W": {"QUANTIZER": {"BIT": 4}}, "A": {"QUANTIZER": {"BIT": 4}}}


def errors(qmodel, data, checker=F.mse_loss, is_async=True):
    return QuantizationErrorProfiler(qmodel.model).apply(data, checker, is_async)


def outputs(qmodel, x, names, w_quant, a_quant):
    """The outputs of layers in a plain forward."""
    qmodel.set_quant(w_quant, a_quant)
    found, handles = {}, []
    for name in names:
        keep = lambda m, args, out, name=name: found.__setitem__(name, out.clone())
        handles.append(qmodel.model.get_submodule(name).register_forward_hook(keep))
    with torch.no_grad():
        qmodel(x)
    for handle in handles:
        handle.remove()
    return found


@pytest.fixture
def qmodel():
    return sparsebit.quantize(small_net(bias=True), X, W4A4)


def test_sync_is_the_difference_of_two_whole_forwards(qmodel):
    found = errors(qmodel, X[0], is_async=False)
    quantized = outputs(qmodel, X[0], list(found), True, True)
    real = outputs(qmodel, X[0], list(found), False, False)
    assert list(found) == [
        *("conv1", "layer1_0_conv1", "layer1_0_conv2", "layer1_1_conv1", "layer1_1_conv2", "pool", "fc")
    ]
    for name, value in found.items():
        torch.testing.assert_close(value, F.mse_loss(quantized[name], real[name]))


def test_async_quantizes_one_layer_at_a_time(qmodel):
    found = errors(qmodel, X[0])
    for name in ("conv1", "layer1_0_conv2", "fc"):
        real = outputs(qmodel, X[0], [name], False, False)[name]
        qmodel.set_quant(False, False)
        module = qmodel.model.get_submodule(name)
        held = []
        handle = module.register_forward_pre_hook(lambda m, args: held.append(args[0].clone()))
        with torch.no_grad():
            qmodel(X[0])
            handle.remove()
            module.set_quant(True, True)
            torch.testing.assert_close(found[name], F.mse_loss(module(held[0]), real))


def test_the_first_layer_has_the_same_error_in_both_and_later_ones_more_in_sync(qmodel):
    alone, together = errors(qmodel, X), errors(qmodel, X, is_async=False)
    assert list(alone) == list(together)
    assert alone["conv1"] == together["conv1"]
    assert all(together[name] > alone[name] for name in alone if name != "conv1")


def test_several_batches_give_the_mean(qmodel):
    one_by_one = [errors(qmodel, x) for x in X]
    for name, value in errors(qmodel, X).items():
        torch.testing.assert_close(value, torch.stack([e[name] for e in one_by_one]).mean())


def test_any_checker(qmodel):
    cosine = errors(qmodel, X[0], lambda q, r: F.cosine_similarity(q.flatten(1), r.flatten(1)).mean())
    assert all(0.5 < value < 1 for value in cosine.values())
    decibel = errors(qmodel, X[0], lambda q, r: sqnr(r, q))
    assert all(isinstance(value, float) and value > 5 for value in decibel.values())


def test_switched_on_quantizers_count_and_modes_come_back(qmodel):
    qmodel.set_quant(w_quant=True, a_quant=False)
    qmodel.train()
    modes = [m.mode for m in qmodel.modules() if isinstance(m, Quantizer)]
    weights_only = errors(qmodel, X[0])
    assert "pool" not in weights_only  # it has no weight

    def broken(quantized, real):
        raise ZeroDivisionError

    for is_async in (True, False):
        with pytest.raises(ZeroDivisionError):
            errors(qmodel, X[0], broken, is_async)
    assert [m.mode for m in qmodel.modules() if isinstance(m, Quantizer)] == modes
    assert all(m.training for m in qmodel.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in qmodel.modules())
    qmodel.set_quant(False, False)
    assert errors(qmodel, X[0])["conv1"] > weights_only["conv1"]  # nothing is on: everything counts


def test_it_needs_a_calibrated_model():
    with pytest.raises(CalibrationError, match="no scale yet"):
        errors(QuantModel(small_net(), "w8a8"), X[0])


# -- D33 --------------------------------------------------------------------------------------------
class Parts(nn.Module):
    """A parameter read directly, several inputs, one of them by keyword only, softmax by keyword."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = Attention(8, 2)
        self.inner.token = nn.Parameter(torch.randn(1, 1, 8))
        self.fc = nn.Linear(8, 8)

    def forward(self, x, y, *, scale=None):
        x = torch.cat([x + self.inner.token, y], dim=1)
        x = F.softmax(self.inner(x), dim=-1)
        return self.fc(x if scale is None else x * scale)


@pytest.mark.parametrize("is_async", [True, False])
def test_D33_get_attr_nodes_several_inputs_and_keywords(is_async):
    x, y = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    qmodel = sparsebit.quantize(Parts().eval(), [(x, y)], "w8a8")
    by_place = errors(qmodel, (x, y), is_async=is_async)
    by_name = errors(qmodel, {"y": y, "x": x}, is_async=is_async)
    listed = errors(qmodel, [(x, y), {"x": x, "y": y}], is_async=is_async)
    assert {"inner_qkv", "inner_proj", "matmul_identity0", "fc"} <= set(by_place)
    assert by_place == by_name == listed
    assert all(0 < value < 1e-2 for value in by_place.values())


# -- islands ----------------------------------------------------------------------------------------
class Stubborn(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.fc1(x)
        if x.sum() > 1e9:
            return x
        return self.fc2(x.relu_())  # writes into what fc1 gave


class WithIsland(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.island = nn.Linear(8, 8), Stubborn()

    def forward(self, x):
        return self.island(self.head(x))


@pytest.mark.parametrize("is_async", [True, False])
def test_an_island_is_a_row_and_so_are_the_layers_inside(is_async):
    x = torch.randn(64, 8)
    qmodel = sparsebit.quantize(WithIsland(), [x], W4A4)
    found = errors(qmodel, x, is_async=is_async)
    assert list(found) == ["head", "island_fc1", "island_fc2", "island"]
    quantized = outputs(qmodel, x, ["head", "island", "island.fc1", "island.fc2"], True, True)
    real = outputs(qmodel, x, ["head", "island", "island.fc1", "island.fc2"], False, False)
    if not is_async:
        for name, value in found.items():
            path = name.replace("island_", "island.")
            torch.testing.assert_close(value, F.mse_loss(quantized[path], real[path]))
    else:
        assert found["island"] > found["island_fc2"] > 0
        layer = qmodel.model.get_submodule("island.fc2")
        layer.set_quant(True, True)
        torch.testing.assert_close(
            found["island_fc2"], F.mse_loss(layer(real["island.fc1"].relu()), real["island.fc2"])
        )


def test_a_model_that_is_one_island_and_layers_made_of_layers():
    x = torch.randn(64, 8)
    whole = errors(sparsebit.quantize(Stubborn(), [x], "w8a8"), x)
    assert {"fc1", "fc2"} <= set(whole)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    tokens = torch.randn(2, 5, 8)
    found = errors(sparsebit.quantize(layer, [tokens], "w8a8"), tokens)
    assert any(name.endswith("self_attn_q_proj") for name in found)


def test_one_layer_called_twice_has_a_row_per_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(self.fc(x))

    x = torch.randn(16, 8)
    qmodel = sparsebit.quantize(Twice(), [x], "w8a8")
    alone, together = errors(qmodel, x), errors(qmodel, x, is_async=False)
    assert list(alone) == ["fc", "fc_1"]
    assert together["fc_1"] > alone["fc_1"]
