"""A.RNN_STATE: the hidden state rounded at every step, against torch's kernels in float and by hand when rounded."""

from __future__ import annotations

import copy

import pytest
import torch
from test_recurrent import CASES, CELLS, CFG, H, I, N, T, assert_same, make, sequence, states
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import sparsebit
from models import sqnr
from sparsebit.quantization import QuantModel
from sparsebit.quantization.analysis.costs import macs_quantized
from sparsebit.quantization.modules.composite.recurrent_steps import StepByStep

STATE = {**CFG, "A": {**CFG["A"], "RNN_STATE": True}}
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def as_it_is(x):
    return x


def in_steps(layer):
    """The same layer, computed step by step without rounding."""
    projected = as_it_is if getattr(layer, "proj_size", 0) else None

    def call(*args):
        with StepByStep(as_it_is, projected):
            return layer(*args)

    return call


# -- float: the loop is the kernel -------------------------------------------------------------------
@pytest.mark.parametrize("cls, options", CASES)
def test_steps_equal_the_kernel(cls, options):
    layer = make(cls, **options)
    steps = in_steps(layer)
    for batched in (True, False):
        x, hx = sequence(layer, batched), states(layer, batched)
        assert_same(steps(x), layer(x))
        assert_same(steps(x, hx), layer(x, hx))
    torch.manual_seed(1)
    for lengths, sort in ((5, 3, 2), True), ((3, 5, 2), False):
        packed = pack_sequence([torch.randn(n, I) for n in lengths], enforce_sorted=sort)
        assert_same(steps(packed, states(layer)), layer(packed, states(layer)))


CELL_CASES = [(cls, options) for cls in CELLS for options in ({}, {"bias": False})]
CELL_CASES += [(nn.RNNCell, {"nonlinearity": "relu"})]


@pytest.mark.parametrize(("cls", "options"), CELL_CASES, ids=str)
def test_cells_in_steps(cls, options):
    cell, x, h = make(cls, **options), torch.randn(N, I), torch.randn(N, H)
    hx = (h, torch.randn(N, H)) if cls is nn.LSTMCell else h
    assert_same(in_steps(cell)(x), cell(x))
    assert_same(in_steps(cell)(x, hx), cell(x, hx))


def test_dropout_between_layers_is_applied_in_training_only():
    layer = make(nn.LSTM, num_layers=2, dropout=1.0)
    x = sequence(layer)
    assert_same(in_steps(layer)(x), layer(x))
    layer.train()
    assert_same(in_steps(layer)(x), layer(x))  # all dropped: both read zeros


# -- rounded -----------------------------------------------------------------------------------------
class Reader(nn.Module):
    def __init__(self, cls, **options):
        super().__init__()
        self.rnn = make(cls, batch_first=True, **options)
        self.head = nn.Linear((options.get("proj_size") or H) * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def quantized(cls, config=STATE, **options):
    net, x = Reader(cls, **options).eval(), torch.randn(N, T, I, generator=torch.Generator().manual_seed(0))
    return net, x, sparsebit.quantize(net, [x], config)


def rounded(x, quantizer):
    scale, zero = quantizer.scale.double(), quantizer.zero_point.double()
    codes = (x.double() / scale).round() + zero
    return (codes.clamp(quantizer.spec.qmin, quantizer.spec.qmax) - zero) * scale


@torch.no_grad()
def test_an_lstm_rounded_by_hand():
    """In double precision, with the formulas of the paper and grids taken from the model."""
    _, x, qmodel = quantized(nn.LSTM)
    layer, head = qmodel.model.rnn, qmodel.model.head
    w_ih, w_hh = layer.weight_ih_l0().double(), layer.weight_hh_l0().double()
    b = (layer.bias_ih_l0 + layer.bias_hh_l0).double()
    x_q = rounded(x, layer.input_quantizer)
    h = c = torch.zeros(N, H, dtype=torch.float64)
    outputs = []
    for t in range(T):
        i, f, g, o = (x_q[:, t] @ w_ih.T + rounded(h, layer.state.input_quantizer) @ w_hh.T + b).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    want = (
        rounded(torch.stack(outputs, 1), head.input_quantizer) @ head.quantized_weight().double().T
        + head.bias
    )
    torch.testing.assert_close(qmodel(x).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_every_multiplication_is_quantized(cls, options):
    net, x, qmodel = quantized(cls, **options)
    done, total = macs_quantized(qmodel, x)
    assert done == total
    with torch.no_grad():
        assert 20 < sqnr(net(x), qmodel(x)) < 80
    done, total = macs_quantized(quantized(cls, CFG, **options)[2], x)
    assert done < total  # without the option


def test_projected_states_have_a_grid_each():
    _, x, qmodel = quantized(nn.LSTM, num_layers=2, proj_size=2)
    names = {name for name, _ in qmodel.named_quantizers()}
    assert {"rnn_state.input_quantizer", "rnn_unprojected.input_quantizer"} <= names
    assert macs_quantized(qmodel, x)[0] == macs_quantized(qmodel, x)[1]


def test_the_option_is_per_layer_and_off_by_default():
    off = quantized(nn.GRU, CFG)[2]
    assert not any("state" in name for name, _ in off.named_quantizers())
    one = {**CFG, "A": {**CFG["A"], "SPECIFIC": [{"rnn*": ["RNN_STATE", True]}]}}
    assert any("state" in name for name, _ in quantized(nn.GRU, one)[2].named_quantizers())


def test_two_bits_of_state_cost_more_than_eight():
    coarse = {**STATE, "A": {**STATE["A"], "SPECIFIC": [{"rnn_state": ["QUANTIZER.BIT", 2]}]}}
    net, x, fine = quantized(nn.LSTM)
    with torch.no_grad():
        assert sqnr(net(x), quantized(nn.LSTM, coarse)[2](x)) < sqnr(net(x), fine(x)) - 5


def test_training_saving_copying(tmp_path):
    net, x, qmodel = quantized(nn.LSTM, num_layers=2)
    with torch.no_grad():
        want = qmodel(x)
        assert torch.equal(copy.deepcopy(qmodel)(x), want)
        qmodel.save(tmp_path)
        assert torch.equal(QuantModel.load(tmp_path, net)(x), want)
    qmodel.train()(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in qmodel.parameters())


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU])
def test_the_exported_file_is_certified(cls, tmp_path):
    pytest.importorskip("onnxruntime")
    _, x, qmodel = quantized(cls, {**STATE, "BACKEND": "onnxruntime"}, bidirectional=True)
    report = qmodel.export_onnx(x, tmp_path / "rnn.onnx")
    assert report.ok and "rnn_state.input_quantizer" in report.certificate.quantizers
    assert sum(c.wrong for c in report.certificate.quantizers.values()) == 0


def test_preflight_names_the_option():
    text = str(sparsebit.preflight(Reader(nn.LSTM), torch.randn(N, T, I)))
    assert "A.RNN_STATE is off" in text
