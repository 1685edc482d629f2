"""Models that write in place, share layers or keep views: the float output is the user's, bit by bit of meaning, and
the quantized one does not depend on memory reuse. Found by trying to break it."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsebit
from models import randomise, sqnr
from sparsebit.errors import TraceError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.quantizers import QUANTIZERS_MAP, Quantizer, register_quantizer


class Net(nn.Module):
    """Three convolutions, helpers, and a forward given as a function."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.relu, self.idt, self.drop = nn.ReLU(inplace=True), nn.Identity(), nn.Dropout(0.5)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def lines(*steps):
    """A forward from statements; the last is the result."""
    body = "\n".join(f"    {step}" for step in steps[:-1])
    scope: dict[str, object] = {"F": F, "torch": torch}
    exec(f"def function(s, x):\n{body}\n    return {steps[-1]}", scope)
    return scope["function"]


FORWARDS = {
    "identity shortcut": lines("y = s.a(x)", "r = s.idt(y)", "y = s.relu(y)", "s.b(y) + r"),
    "view before a write": lines("y = s.a(x)", "v = y.view(2, -1)", "F.relu(y, inplace=True)", "v"),
    "dropout is an alias in eval": lines("y = s.a(x)", "r = s.drop(y)", "y.mul_(2)", "s.b(r)"),
    "+= after a view": lines("y = s.a(x)", "v = y[:, :2]", "y += 1", "s.b(y), v"),
    "+= on a chunk": lines(
        *("y = s.a(x)", "p, q = y.chunk(2, 1)", "p = F.relu(p, inplace=True)", "q += p"),
        "s.b(torch.cat([p, q], 1)) * y",
    ),
    "residual +=": lines("y = s.a(x)", "y += x", "s.b(F.relu(y)) + y"),
    "in-place relu on a view": lines(
        "y = s.a(x)", "v = y.view(2, 4, 64).view(2, 4, 8, 8)", "z = s.relu(v)", "s.b(z) + v"
    ),
    "positional inplace": lines("y = x.reshape(2, 4, 8, 8) * 1", "z = F.relu(y, True)", "s.b(z) + y"),
    "write without using the result": lines("y = s.a(x)", "F.relu(y, inplace=True)", "s.b(y)"),
    "reader after an in-place relu": lines("y = s.a(x)", "z = s.relu(y)", "s.b(z) + y"),
    "a layer called twice": lines("y = s.a(x)", "s.b(y) + s.b(x) + x"),
    "a shared layer and another reader": lines("b = s.b(s.a(x))", "c = s.c(x)", "d = s.b(c)", "b + d + c"),
    "setitem": lines("y = s.a(x).clone()", "y = torch.where(y > 0, y, y * 0.1)", "s.b(y)"),
    "several outputs": lines("y = s.a(x)", "z = F.relu(y)", "{'y': y, 'z': (z, s.b(z))}"),
}


def leaves(value):
    return torch.utils._pytree.tree_leaves(value)


def net(function):
    torch.manual_seed(0)
    return Net(function).eval()


X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", FORWARDS)
def test_writes_and_aliases(name):
    model = net(FORWARDS[name])
    with torch.no_grad():
        want = leaves(model(X.clone()))
        qmodel = QuantModel(model, "w8a8")
        for got, value in zip(leaves(qmodel(X.clone())), want):
            torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5)
        for asym in (False, True):
            qmodel.calibrate([X.clone()], asym=asym)
            qmodel.set_quant(True, True)
            mine = X.clone()
            quantized = leaves(qmodel(mine))
            if "shared" in name or "twice" in name or name == "residual +=":
                assert torch.equal(mine, X)  # the caller's tensor is the caller's
            assert all(sqnr(v, q) > 20 for v, q in zip(want, quantized))
            for module in qmodel.model.modules():
                if hasattr(module, "reuse"):
                    module.reuse = None
            assert all(torch.equal(a, b) for a, b in zip(leaves(qmodel.model(X.clone())), quantized))


def test_reuse_holds_only_inside_the_models_forward():
    qmodel = sparsebit.quantize(net(lines("s.b(F.relu(s.a(x)))")), [X])
    relu, conv, t = qmodel.model.relu, qmodel.model.b, torch.randn(2, 4, 8, 8)
    assert relu.reuse and conv.input_quantizer.reuse
    with torch.no_grad():
        want = qmodel(X)
        keep = t.clone()
        relu(t), conv(t)  # a layer called on its own
        assert torch.equal(t, keep)
        values = {}
        interpreter = torch.fx.Interpreter(qmodel.model)
        run_node = interpreter.run_node
        interpreter.run_node = lambda n: values.setdefault(n.name, run_node(n))
        assert torch.equal(interpreter.run(X), want) and values["a"].min() < 0
        seen = []
        handle = conv.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        assert torch.equal(qmodel(X), want) and torch.equal(
            seen[0], values["a"].relu()
        )  # not the rounded ones
        handle.remove()
        qmodel.model.a = nn.Identity()
        mine = X.clone()
        qmodel(mine)
        assert torch.equal(mine, X)


def test_a_users_quantizer_may_look_at_its_input_again():
    @register_quantizer
    class Half(Quantizer):
        TYPE = "half_rounded"

        def _forward(self, x, scale, zero_point):
            rounded = super()._forward(x, scale, zero_point)
            return 0.5 * rounded + 0.5 * x

    try:
        cfg = {
            "BACKEND": "virtual",
            "A": {"QUANTIZER": {"TYPE": "half_rounded", "BIT": 2}},
            "SCHEDULE": {"BIAS_CORRECTION": False},
        }
        qmodel = sparsebit.quantize(net(lines("s.b(F.relu(s.a(x)))")), [X], cfg)
        with torch.no_grad():
            fast = qmodel(X)
        torch.testing.assert_close(fast, qmodel(X).detach())  # with grad nothing is reused
    finally:
        QUANTIZERS_MAP._items.pop("half_rounded")


# -- weights and batch norms --------------------------------------------------------------------------
def test_folding_does_not_touch_shared_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
            self.b.weight = self.a.weight
            self.n1, self.n2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

        def forward(self, x):
            return self.n2(self.b(self.n1(self.a(x)))), F.conv2d(x, self.a.weight)

    model = randomise(Tied())
    for got, want in zip(QuantModel(model, "w8a8")(X), model(X)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_skipped_and_overridden_batch_norms_are_not_folded():
    class Doubled(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x) * 2

    model = randomise(nn.Sequential(nn.Conv2d(4, 4, 1), Doubled(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
    cfg = {"BACKEND": "virtual", "SCHEDULE": {"FUSE_BN": True}, "SKIP_TRACE_MODULES": ["1", "3"]}
    qmodel = QuantModel(model, cfg)
    torch.testing.assert_close(qmodel(X), model(X), rtol=1e-4, atol=1e-5)
    assert len(qmodel.float_ops) == 2


def test_a_frozen_batch_norm_stays_frozen():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).train()
    model[1].eval()
    qmodel = QuantModel(model, {"BACKEND": "virtual"})
    assert qmodel.model._0.training and not qmodel.model._1.training
    torch.testing.assert_close(qmodel(X), model(X))


@pytest.mark.parametrize(
    "norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
)
def test_parametrized_weights(norm):
    model = nn.Sequential(norm(nn.Conv2d(4, 4, 3)), nn.ReLU()).eval()
    torch.testing.assert_close(sparsebit.QuantModel(model)(X), model(X))
    assert sqnr(model(X), sparsebit.quantize(model, [X])(X)) > 25


# -- names, calls, roots ------------------------------------------------------------------------------
def test_parameters_named_like_functions():
    class Names(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.mul, self.relu = (
                nn.Conv2d(4, 4, 1),
                nn.Parameter(torch.ones(1)),
                nn.Parameter(torch.ones(1)),
            )
            self.register_buffer("size", torch.ones(1))

        def forward(self, x):
            return F.relu(self.conv(x)) * 2 * self.mul * self.relu * x.size(0) * self.size

    model = Names()
    torch.testing.assert_close(QuantModel(model)(X), model(X))


def test_keyword_calls_of_layers():
    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.fc = nn.Conv2d(4, 4, 1), nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x):
            return self.fc(input=self.norm(input=self.conv(input=x)))

    model = Keywords()
    qmodel = sparsebit.quantize(model, [X])
    assert sqnr(model(X), qmodel(X)) > 25 and qmodel.model.conv.bias_correction.abs().sum() > 0


@pytest.mark.parametrize("layer", [nn.Linear(8, 3), nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 2)], ids=str)
def test_a_single_layer_is_a_model(layer):
    qmodel = sparsebit.quantize(layer, [X])
    assert len(list(qmodel.named_quantizers())) == 2 and sqnr(layer(X), qmodel(X)) > 25


def test_a_model_without_anything_to_quantize_says_so(caplog):
    with caplog.at_level(logging.WARNING, "sparsebit"):
        QuantModel(nn.Sequential(nn.Flatten()))
    assert "nothing will be quantized" in caplog.text


def test_unbatched_images():
    layer, x = nn.Conv2d(8, 4, 3), torch.rand(8, 8, 8) + torch.arange(8.0).view(8, 1, 1)
    cfg = {
        "BACKEND": "virtual",
        "W": {"QUANTIZER": {"BIT": 3}},
        "A": {"QUANTIZER": {"DISABLE": True}},
        "SCHEDULE": {"BIAS_CORRECTION": True},
    }
    qmodel = sparsebit.quantize(nn.Sequential(layer), [x], cfg)
    with torch.no_grad():
        assert (layer(x) - qmodel(x)).mean((1, 2)).abs().max() < 0.05


def test_buffers_updated_in_forward_go_on_updating(caplog):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 3)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps += 1
            return self.fc(x)

    class Running(Counting):
        def forward(self, x):
            self.steps = self.steps + x.mean()
            return self.fc(x)

    for model in (Counting(), Running()):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "sparsebit"):
            qmodel = sparsebit.quantize(model, [X + 1])
        assert "updates its buffer 'steps'" in caplog.text and model.steps == 0
        before = qmodel.state_dict()["model.whole.root.steps"].clone()
        qmodel(X + 1)
        assert qmodel.state_dict()["model.whole.root.steps"] > before
        assert "fc.weight_quantizer" in dict(qmodel.named_quantizers())


@pytest.mark.parametrize("bad", [lambda x: x, nn.Linear, None])
def test_what_is_no_model_is_refused(bad):
    with pytest.raises(TraceError, match=r"expected an instance of nn.Module"):
        QuantModel(bad)
    with pytest.raises(TraceError, match="a QuantModel already"):
        QuantModel(QuantModel(nn.Linear(2, 2)))


# -- lifecycle ----------------------------------------------------------------------------------------
def test_half_precision_keeps_scales_in_float32():
    qmodel = sparsebit.quantize(nn.Sequential(nn.Conv2d(4, 4, 1)), [X])
    scale = qmodel.model._0.input_quantizer.scale.clone()
    qmodel.bfloat16()
    assert torch.equal(qmodel.model._0.input_quantizer.scale, scale)
    assert qmodel(X.bfloat16()).dtype == torch.bfloat16


def test_calibration_under_inference_mode_leaves_trainable_scales():
    qmodel = QuantModel(nn.Sequential(nn.Conv2d(4, 4, 1)), "w8a8")
    with torch.inference_mode():
        qmodel.calibrate([X])
    qmodel.set_quant(True, True)
    qmodel(X.clone().requires_grad_()).sum().backward()


def test_an_interrupted_calibration_does_not_go_on_observing():
    qmodel = QuantModel(nn.Sequential(nn.Conv2d(4, 4, 1)), {"BACKEND": "virtual"})

    def broken():
        yield X
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        qmodel.calibrate(broken())
    assert not any(q.mode.value == "observe" or q.observer.has_data for _, q in qmodel.named_quantizers())


def test_lsq_reloads_from_a_state_dict_and_starts_afresh():
    cfg = {
        "BACKEND": "virtual",
        "A": {"QSCHEME": "per-tensor-affine", "QUANTIZER": {"TYPE": "lsq", "BIT": 4}},
    }
    model = nn.Sequential(nn.Conv2d(4, 4, 1)).eval()
    qmodel = sparsebit.quantize(model, [X], cfg)  # signed data: lsq turns symmetric
    fresh = QuantModel(model, cfg)
    fresh.load_state_dict(qmodel.state_dict())
    fresh.set_quant(True, True)
    assert torch.equal(fresh(X), qmodel(X))
    again = QuantModel(model, cfg)
    again.prepare_calibration()
    again(X * 100)
    again.prepare_calibration()
    again(X)
    again.calc_qparams()
    torch.testing.assert_close(again.model._0.input_quantizer.scale, qmodel.model._0.input_quantizer.scale)
    before = again.model._0.input_quantizer.scale.clone()
    again.model._0.input_quantizer.set_bit(4)
    assert torch.equal(again.model._0.input_quantizer.scale, before)


def test_a_layer_without_data_comes_back_with_data():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, x, y):
            return self.a(x), self.b(y)

    model, v = Two(), torch.randn(4, 8)
    qmodel = QuantModel(model, {"BACKEND": "virtual"}).calibrate([(v, v[:0])])
    qmodel.set_quant(True, True)
    fresh = QuantModel(model, {"BACKEND": "virtual"})
    fresh.load_state_dict(qmodel.state_dict())
    fresh.set_quant(True, True)  # the state_dict carries that b saw nothing
    assert "saw no float data" in repr(fresh.model.b.input_quantizer)
    qmodel.calibrate([(v, v)])
    assert "b.input_quantizer" in dict(qmodel.named_quantizers())


def test_set_bit_drops_the_bias_correction_of_the_old_width():
    qmodel = sparsebit.quantize(nn.Sequential(nn.Conv2d(4, 4, 1)), [X + 1])
    assert qmodel.model._0.bias_correction.abs().sum() > 0
    qmodel.model._0.weight_quantizer.set_bit(4)
    assert qmodel.model._0.bias_correction.abs().sum() == 0


def test_asym_with_star_arguments():
    class Star(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 2)

        def forward(self, *values):
            return self.fc(values[0])

    assert (
        QuantModel(Star(), {"BACKEND": "virtual"})
        .calibrate([(X,)], asym=True)
        .model.fc.input_quantizer.calibrated
    )
