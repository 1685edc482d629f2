"""What every registered plug-in promises; whatever is registered enters by itself."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import fx

import sparsebit
from models import Attention, images, randomise, small_net, sqnr
from sparsebit.errors import ConfigError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.observers import OBSERVERS_MAP, build_observer
from sparsebit.quantization.presets import presets
from sparsebit.quantization.quantizers import QUANTIZERS_MAP, build_quantizer
from sparsebit.quantization.quantizers.quant_descriptor import QuantDescriptor

OBSERVERS, QUANTIZERS = sorted(OBSERVERS_MAP), sorted(QUANTIZERS_MAP)
SCHEMES = ["per-tensor-symmetric", "per-tensor-affine", "per-channel-symmetric", "per-channel-affine"]


def section(letter, *overrides):
    return getattr(sparsebit.QuantConfig.load({"BACKEND": "virtual"}).override(*overrides), letter.lower())


def data(n=3):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(4, 5, 6, 6, generator=g) + 0.3 for _ in range(n)]


# -- observers ---------------------------------------------------------------------------------------
def observer(name, scheme="per-tensor-affine", bits=8, letter="A"):
    cfg = section(
        letter, f"{letter}.OBSERVER.TYPE", name, f"{letter}.QSCHEME", scheme, f"{letter}.QUANTIZER.BIT", bits
    )
    return build_observer(cfg, QuantDescriptor(cfg))


def seen(obs, batches):
    for x in batches:
        obs.update(x)
    return obs


@pytest.mark.parametrize("letter", "WA")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", OBSERVERS)
def test_observer_gives_a_usable_grid(name, scheme, letter):
    obs = seen(observer(name, scheme, letter=letter), data(1))
    scale, zero_point = obs.calc_qparams()
    channels = 1 if "tensor" in scheme else 4 if letter == "W" else 5
    assert scale.shape == zero_point.shape == (channels,)
    assert (scale > 0).all() and scale.isfinite().all() and zero_point.round().equal(zero_point)
    assert (obs.spec.qmin <= zero_point).all() and (zero_point <= obs.spec.qmax).all()


@pytest.mark.parametrize("scheme", ["per-tensor-affine", "per-channel-symmetric"])
@pytest.mark.parametrize("name", OBSERVERS)
def test_two_halves_merged_equal_the_whole(name, scheme):
    batches = data(6)
    whole = seen(observer(name, scheme), batches).calc_qparams()
    first, second = seen(observer(name, scheme), batches[:3]), seen(observer(name, scheme), batches[3:])
    first.merge(second)
    for a, b in zip(first.calc_qparams(), whole):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in OBSERVERS if n != "moving_average"])
def test_the_order_of_batches_does_not_matter(name):
    batches = data(5)
    for a, b in zip(
        seen(observer(name), batches).calc_qparams(), seen(observer(name), batches[::-1]).calc_qparams()
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OBSERVERS)
def test_state_does_not_grow_with_batches(name):
    def size(obs):
        return sum(v.numel() for v in vars(obs).values() if isinstance(v, torch.Tensor)) + len(
            torch.utils._pytree.tree_leaves(
                [v for v in vars(obs).values() if isinstance(v, (list, dict, tuple))]
            )
        )

    assert size(seen(observer(name), data(2))) == size(seen(observer(name), data(20)))


@pytest.mark.parametrize("name", OBSERVERS)
def test_observer_state_dict_round_trips(name):
    obs = seen(observer(name, "per-channel-affine"), data())
    obs.calc_qparams()
    fresh = observer(name, "per-channel-affine")
    fresh.load_state_dict(obs.state_dict())
    assert torch.equal(fresh.min_val, obs.min_val) and torch.equal(fresh.max_val, obs.max_val)


# -- quantizers --------------------------------------------------------------------------------------
def quantizer(name, letter, scheme, bits=4):
    options = (f"{letter}.QUANTIZER.TYPE", name, f"{letter}.QSCHEME", scheme, f"{letter}.QUANTIZER.BIT", bits)
    return build_quantizer(section(letter, *options))


def takes(name, scheme, letter) -> bool:
    """A plug-in may refuse a combination, and says then what to change."""
    try:
        quantizer(name, letter, scheme)
    except ConfigError as reason:
        assert f"{letter}." in str(reason), reason
        return False
    return True


TAKEN = [case for case in itertools.product(QUANTIZERS, SCHEMES, "WA") if takes(*case)]


def test_every_quantizer_takes_something():
    assert {name for name, _, _ in TAKEN} == set(QUANTIZERS)


@pytest.mark.parametrize(("name", "scheme", "letter"), TAKEN)
def test_quantizer_contract(name, scheme, letter):
    """Stays on its grid, has finite gradients, reloads, and shows itself in one line."""
    q = quantizer(name, letter, scheme)
    x = data(1)[0]
    q.update_observer(x)
    q.calc_qparams()
    assert q.calibrated and "\n" not in repr(q) and str(q.bit) in repr(q)
    q.enable_quant()
    y = q(x)
    assert y.shape == x.shape and y.isfinite().all()
    values = (
        y.detach().unique() if "tensor" in scheme else y.detach().movedim(q.ch_axis, 0).flatten(1)[0].unique()
    )
    assert 1 < len(values) <= 2**q.bit
    x = x.requires_grad_()
    q(x).square().sum().backward()
    assert x.grad.isfinite().all() and x.grad.abs().sum() > 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in q.parameters() if p.requires_grad)
    fresh = quantizer(name, letter, scheme)
    fresh.load_state_dict(q.state_dict())
    fresh.qdesc.set_symmetric(q.is_symmetric)
    fresh.enable_quant()
    assert torch.equal(fresh(x), q(x))


@pytest.mark.parametrize("name", [name for name, *rest in TAKEN if rest == ["per-tensor-affine", "A"]])
def test_quantizer_passes_through_what_is_no_float_tensor(name):
    q = quantizer(name, "A", "per-tensor-affine")
    q.scale.data.fill_(1.0)
    q.enable_quant()
    index = torch.arange(3)
    assert q(index) is index and q(7) == 7 and q(None) is None


# -- presets -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(presets()))
def test_preset_quantizes_a_network(name):
    net, x = small_net(), images()[0]
    qmodel = sparsebit.quantize(net, images(), name)
    bits = min(qmodel.cfg.w.quantizer.bit, qmodel.cfg.a.quantizer.bit)
    with torch.no_grad():
        assert sqnr(net(x), qmodel(x)) > {8: 20, 4: 20, 3: 20, 2: 12}[bits]
        qmodel.set_quant(False, False)
        torch.testing.assert_close(qmodel(x), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OBSERVERS)
def test_every_observer_in_a_model(name):
    net, x = small_net(), images()[0]
    cfg = sparsebit.QuantConfig.load("w8a8").override("A.OBSERVER.TYPE", name, "W.OBSERVER.TYPE", name)
    with torch.no_grad():
        assert sqnr(net(x), sparsebit.quantize(net, images(), cfg)(x)) > 12


def test_attention_in_a_model():
    net, x = randomise(Attention()), torch.randn(2, 5, 16)
    qmodel = sparsebit.quantize(
        net, [x], sparsebit.QuantConfig.load("w8a8").override("A.OBSERVER.LAYOUT", "NLC")
    )
    names = dict(qmodel.named_quantizers())
    assert {"matmul_identity0.input_quantizer", "matmul_1_identity1.input_quantizer"} <= set(names)
    with torch.no_grad():
        assert sqnr(net(x), qmodel(x)) > 25


def test_deepcopy_is_independent():
    qmodel = sparsebit.quantize(small_net(), images())
    twin, x = copy.deepcopy(qmodel), images()[0]
    with torch.no_grad():
        want = qmodel(x)
        assert torch.equal(twin(x), want)
        twin.model.fc.weight.zero_()
        assert torch.equal(qmodel(x), want) and not torch.equal(twin(x), want)
    assert isinstance(twin.model, fx.GraphModule) and isinstance(twin.model.fc, QuantOpr)
    assert isinstance(QuantModel(small_net()).model.fc, QuantOpr)
