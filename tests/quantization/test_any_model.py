"""Models as people write them, quantized: shared layers, tied weights, every dtype, autocast, compile, copies."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsebit
from models import images, small_net, sqnr
from sparsebit.errors import TraceError
from sparsebit.quantization import QuantModel

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Twice(nn.Module):
    """One layer, called on values of very different size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x) + self.fc(x * 100) / 100


def test_a_layer_called_twice_has_one_weight_quantizer_and_one_range_for_all_calls():
    qmodel = sparsebit.quantize(Twice(), [X], {"BACKEND": "virtual"})
    assert set(dict(qmodel.named_quantizers())) == {"fc.weight_quantizer", "fc.input_quantizer"}
    low, high = (X * 100).aminmax()
    scale = qmodel.model.fc.input_quantizer.scale
    torch.testing.assert_close(scale * 255, (high - low).reshape(1), rtol=0.2, atol=0)


def test_per_call_gives_each_call_a_range_of_its_own():
    cfg = {"BACKEND": "virtual", "A": {"PER_CALL": True}}
    model = Twice()
    qmodel = sparsebit.quantize(model, [X], cfg)
    names = set(dict(qmodel.named_quantizers()))
    assert names == {
        "fc.weight_quantizer",
        "fc_identity.input_quantizer",
        "fc_1_identity.input_quantizer",
    }
    merged = sparsebit.quantize(model, [X], {"BACKEND": "virtual"})
    assert sqnr(model(X), qmodel(X)) > sqnr(model(X), merged(X)) + 6


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def test_tied_weights_stay_tied(tmp_path):
    ids = torch.arange(20).reshape(4, 5)
    qmodel = sparsebit.quantize(Tied(), [ids])
    assert qmodel.model.head.weight is qmodel.model.embed.weight
    qmodel.save(tmp_path / "out")
    again = QuantModel.load(tmp_path / "out", Tied())
    torch.testing.assert_close(again(ids), qmodel(ids))
    assert again.model.head.weight is again.model.embed.weight


@dataclass
class Batch:
    x: Tensor
    mask: Tensor | None = None


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, batch: Batch, extras: list, *, mask=None, return_all: bool = False):
        y = self.fc(batch.x)
        for extra in extras:
            y = y + extra
        if mask is not None:
            y = y * mask
        return {"y": y, "all": (y, batch.x)} if return_all else {"y": y}


@pytest.mark.parametrize("options", [{}, {"mask": torch.ones(8)}, {"return_all": True}])
def test_structured_and_keyword_only_inputs(options):
    model = Structured()
    batch = {"batch": Batch(X), "extras": [X, X * 2], **options}
    qmodel = sparsebit.quantize(model, [batch, batch])
    assert not qmodel.islands
    out, expected = qmodel(**batch), model(**batch)
    assert list(out) == list(expected) and sqnr(expected["y"], out["y"]) > 30


def test_an_input_that_was_left_at_its_default_is_refused_later():
    qmodel = sparsebit.quantize(Structured(), [{"batch": Batch(X), "extras": [X]}])
    with pytest.raises(TraceError, match=r"traced with mask=None.*\n.*example=batch"):
        qmodel(Batch(X), [X], mask=torch.ones(8))


class Forked(nn.Module):
    """A root whose control flow needs values."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x, *, bias=None):
        h = self.fc(self.conv(x.unsqueeze(-1)).flatten(1))
        return h if h.isnan().any() else F.relu(h)


@pytest.mark.parametrize("asym", [False, True])
def test_a_root_that_cannot_be_traced_is_quantized_in_place(asym, tmp_path):
    model = Forked()
    qmodel = sparsebit.quantize(model, [(X,), (X * 2,)], asym=asym)
    assert list(qmodel.islands) == [""]
    assert {n.split(".")[0] for n, _ in qmodel.named_quantizers()} == {"conv", "fc"}
    assert 25 < sqnr(model(X), qmodel(X)) < 60
    qmodel.save(tmp_path / "out")
    torch.testing.assert_close(QuantModel.load(tmp_path / "out", model)(X), qmodel(X))
    four = QuantModel(model, {"BACKEND": "virtual", "W": {"SPECIFIC": [{"fc": ["QUANTIZER.BIT", 4]}]}})
    assert {q.name: q.bit for _, q in four.named_quantizers()}["fc.weight_quantizer"] == 4


class Padded(nn.Conv2d):
    """A forward of its own that cannot be traced: pads by the size of the input."""

    def forward(self, x):
        extra = max((-x.shape[-1]) % 4, 0)
        return F.conv2d(F.pad(x, (0, extra, 0, extra)), self.weight, self.bias, self.stride)


def test_a_layer_with_a_forward_of_its_own_is_quantized():
    model = nn.Sequential(Padded(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
    x = torch.randn(4, 3, 6, 6)
    qmodel = QuantModel(model, "w8a8").calibrate([x])  # without an example no size is decided
    qmodel.set_quant(w_quant=True, a_quant=True)
    layer = qmodel.model.get_submodule("_0")
    assert isinstance(layer, Padded) and layer.weight_quantizer.calibrated
    assert layer.weight_quantizer.scale.numel() == 8  # one per output channel
    assert isinstance(layer.weight, nn.Parameter)
    qmodel(x).sum().backward()
    assert layer.weight.grad is not None
    assert 25 < sqnr(model(x), qmodel(x)) < 60


# -- dtypes, devices, transformations --------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_D46_every_float_type(dtype):
    net = small_net().to(dtype)
    batches = [x.to(dtype) for x in images()]
    qmodel = sparsebit.quantize(net, batches)
    out = qmodel(batches[0])
    assert out.dtype == dtype and sqnr(net(batches[0]).float(), out.float()) > 15
    full = sparsebit.quantize(small_net(), images())
    for name, quantizer in qmodel.named_quantizers():
        mine, theirs = quantizer.scale, dict(full.named_quantizers())[name].scale
        torch.testing.assert_close(mine.float(), theirs, rtol=0.05, atol=1e-6)


def test_channels_last_stays():
    net = small_net().to(memory_format=torch.channels_last)
    batches = [x.to(memory_format=torch.channels_last) for x in images()]
    expected = sparsebit.quantize(small_net(), images())(images()[0])
    torch.testing.assert_close(sparsebit.quantize(net, batches)(batches[0]), expected, rtol=1e-3, atol=1e-3)


def test_autocast():
    net, x = small_net(), images()[0]
    qmodel = sparsebit.quantize(net, images())
    with torch.autocast("cpu", torch.bfloat16):
        out = qmodel(x)
    assert out.dtype == torch.bfloat16 and sqnr(net(x), out.float()) > 12


@pytest.mark.parametrize("make", [small_net, Forked])
def test_deepcopy_is_independent(make):
    model = make()
    x = images()[0] if make is small_net else X
    qmodel = sparsebit.quantize(model, [x])
    other = copy.deepcopy(qmodel)
    torch.testing.assert_close(other(x), qmodel(x))
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert qmodel(x).abs().sum() > 0
    other.set_quant(False, False)
    assert all(q.use_quant for _, q in qmodel.named_quantizers())


@pytest.mark.slow
@pytest.mark.parametrize("make", [small_net, Forked])
def test_torch_compile(make):
    model = make()
    x = images()[0] if make is small_net else X
    qmodel = sparsebit.quantize(model, [x])
    with torch.no_grad():
        expected = qmodel(x)
        out = torch.compile(qmodel)(x)
    assert sqnr(expected, out) > 25  # a code may flip where the compiler adds in another order
