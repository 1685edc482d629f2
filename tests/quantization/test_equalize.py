"""Equalization moves differences between channels into weights: nothing changes but the activation grid."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sparsebit
from models import randomise, sqnr
from sparsebit.quantization import QuantModel


def chain(act: nn.Module, multiplier: int = 1) -> nn.Module:
    """Channels of very different size in front of a depthwise convolution."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), act),
        *(nn.Conv2d(8, 8 * multiplier, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8 * multiplier)),
        *(nn.ReLU6(), nn.Conv2d(8 * multiplier, 4, 1)),
    )
    randomise(net)
    with torch.no_grad():
        net[1].weight *= torch.tensor([0.02, 0.05, 0.1, 0.3, 1.0, 2.0, 8.0, 30.0])
        net[1].bias *= net[1].weight
        net[1].bias[0] = -100.0  # a dead channel
    return net


def config(equalize: bool, *more):
    return sparsebit.QuantConfig.load("w8a8").override("SCHEDULE.EQUALIZE", equalize, *more)


DATA = [torch.randn(8, 3, 10, 10, generator=torch.Generator().manual_seed(i)) for i in range(4)]


@pytest.mark.parametrize("scheme", ["per-tensor-affine", "per-tensor-symmetric"])
@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU6(inplace=True)], ids=["relu", "relu6"])
def test_float_is_kept_and_small_channels_survive(act, multiplier, scheme):
    net = chain(act, multiplier)
    net[2].inplace = False
    x = DATA[0]
    with torch.no_grad():
        want = net[:4](x)  # what the depthwise convolution returns
    errors = {}
    for on in (False, True):
        qmodel = QuantModel(net, config(on, "A.QSCHEME", scheme)).calibrate(DATA)
        with torch.no_grad():
            torch.testing.assert_close(qmodel(x), net(x), rtol=1e-4, atol=1e-4)  # float mode
        quantizer = qmodel.model._3.input_quantizer
        assert quantizer.scale.shape == (1,) and not quantizer.is_perchannel
        quantizer.enable_quant()
        got = {}
        qmodel.model._3.register_forward_hook(lambda m, i, o, got=got: got.update(out=o))
        with torch.no_grad():
            qmodel(x)
            plain = QuantModel(net, config(False)).model  # bn folded, float: the reference per channel
            seen = {}
            plain._3.register_forward_hook(lambda m, i, o, seen=seen: seen.update(out=o))
            plain(x)
        channel = 2 * multiplier  # a small one
        errors[on] = sqnr(seen["out"][:, channel], got["out"][:, channel])
    assert errors[True] > errors[False] + 10, errors
    assert want.shape[1] == 8 * multiplier


def test_it_equals_per_channel_quantization_without_folding():
    """The fold is exact: the same codes as a quantizer with one scale per channel."""
    net, x = chain(nn.ReLU6()), DATA[0]
    folded = QuantModel(net, config(True)).calibrate(DATA)
    loose = QuantModel(net, config(True))
    equalization = loose.model._3.equalization
    equalization.fold = lambda: None
    loose.calibrate(DATA)
    assert loose.model._3.input_quantizer.scale.shape == (8,)
    for w, a in ((True, False), (False, True), (True, True)):
        for qmodel in (folded, loose):
            qmodel.set_quant(w, a)
        with torch.no_grad():  # but for ties of the largest weights, which round either way
            assert sqnr(net(x), folded(x)) > sqnr(net(x), loose(x)) - 1
            assert sqnr(loose(x), folded(x)) > 35


def test_save_load_deepcopy_and_recalibration(tmp_path):
    net, x = chain(nn.ReLU6()), DATA[0]
    qmodel = sparsebit.quantize(net, DATA)
    with torch.no_grad():
        want = qmodel(x)
        qmodel.save(tmp_path)
        assert torch.equal(QuantModel.load(tmp_path, chain(nn.ReLU6()))(x), want)
        fresh = QuantModel(net, "w8a8")
        fresh.load_state_dict(qmodel.state_dict())
        fresh.eval()
        fresh.set_quant(True, True)
        assert torch.equal(fresh(x), want)
        twin = copy.deepcopy(qmodel)
        twin.calibrate(DATA)
        twin.set_quant(True, True)
        assert torch.equal(qmodel(x), want)  # the twin folded its own weights
        assert sqnr(want, twin(x)) > 40
    assert "absorbed" in repr(qmodel) and "per-tensor-affine" in repr(qmodel.model._3.input_quantizer)


def test_chains_that_cannot_be_folded_are_left_alone():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act, self.dw = (
                nn.Conv2d(3, 4, 1),
                nn.ReLU(),
                nn.Conv2d(4, 4, 3, padding=1, groups=4),
            )

        def forward(self, x):
            y = self.act(self.conv(x))
            return self.dw(y) + y  # the value has another reader

    assert QuantModel(Shared(), "w8a8").model.dw.equalization is None
    per_tensor = config(True, "W.QSCHEME", "per-tensor-symmetric")
    assert QuantModel(chain(nn.ReLU()), per_tensor).model._3.equalization is None
