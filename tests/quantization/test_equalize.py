"""Equalization moves differences between channels into weights: nothing changes but the activation grid."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sparsebit
from models import randomise, sqnr
from sparsebit.quantization import QuantModel, quant_model
from sparsebit.quantization.converters.fuse_operations.equalize import equalize_sums
from sparsebit.quantization.converters.fuse_operations.fuse_bn import fuse_bn


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


class Residual(nn.Module):
    """Two linear bottlenecks whose outputs are added; channels of very different size run along the sum."""

    def __init__(self, tail: str = ""):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.stem_bn = nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.up, self.down = nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(12, 8, 1, bias=False)
        self.down_bn, self.head, self.tail = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1), tail
        randomise(self)
        with torch.no_grad():
            for bn in (self.stem_bn, self.down_bn):
                sizes = torch.logspace(-2, 1, 8)
                bn.weight.copy_(sizes)
                bn.bias.copy_(0.1 * sizes)
            for conv in (self.up, self.head):  # what small channels say counts as much
                conv.weight /= torch.logspace(-2, 1, 8).view(1, -1, 1, 1)

    def forward(self, x):
        x = self.stem_bn(self.stem(x))
        x = x + self.down_bn(self.down(torch.relu(self.up(x))))
        if self.tail == "constant":
            x = x + 1.0
        if self.tail == "relu":
            x = torch.relu(x)
        return (self.head(x), x) if self.tail == "output" else self.head(x)


@pytest.fixture
def wired(monkeypatch):
    """The pipeline with equalize_sums in front of fuse_bn."""
    steps = [step for step in quant_model.FUSE_PASSES if step is not equalize_sums]
    steps.insert(steps.index(fuse_bn), equalize_sums)
    monkeypatch.setattr(quant_model, "FUSE_PASSES", steps)


def changes(qmodel: QuantModel) -> int:
    return next(r.changes for r in qmodel.pass_reports if r.name == "equalize_sums")


@pytest.mark.parametrize("preset", ["w8a8", "w8a8-tensorrt"])
@pytest.mark.parametrize("fuse", [True, False])
def test_sums_keep_float_and_lose_noise(wired, preset, fuse):
    net, x = Residual().eval(), DATA[0]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    noise = {}
    for on in (False, True):
        cfg = sparsebit.QuantConfig.load(preset).override("SCHEDULE.EQUALIZE", on, "SCHEDULE.FUSE_BN", fuse)
        qmodel = QuantModel(net, cfg)
        assert changes(qmodel) == int(on)
        qmodel.calibrate(DATA)
        with torch.no_grad():
            torch.testing.assert_close(qmodel(x), net(x), rtol=1e-4, atol=1e-4)
            qmodel.set_quant(True, True)
            noise[on] = sqnr(net(x), qmodel(x))
    assert noise[True] > noise[False] + 3, noise
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_factor_is_the_square_root_of_the_range(wired):
    net = Residual().eval()
    qmodel = QuantModel(net, config(True, "SCHEDULE.FUSE_BN", False))
    size = net.stem_bn.weight.detach()  # both batch norms: mean 0.1 s, deviation s; so the ranges go as s
    want = (size / size.max()).clamp(min=2.0**-8).sqrt()
    model = qmodel.model
    for name in ("stem_bn", "down_bn"):
        torch.testing.assert_close(getattr(model, name).weight, getattr(net, name).weight / want)
        torch.testing.assert_close(getattr(model, name).bias, getattr(net, name).bias / want)
    for name in ("up", "head"):
        torch.testing.assert_close(
            getattr(model, name).weight, getattr(net, name).weight * want.view(1, -1, 1, 1)
        )
    assert torch.equal(model.down.weight, net.down.weight)


@pytest.mark.parametrize("tail", ["constant", "relu", "output"])
def test_sums_that_others_read_are_left_alone(wired, tail):
    net = Residual(tail).eval()
    assert changes(QuantModel(net, "w8a8", check=(DATA[0],))) == 0
    assert changes(QuantModel(Residual().eval(), config(True, "W.QSCHEME", "per-tensor-symmetric"))) == 0
