"""Recurrent layers against torch's own: every option in float, gradients, and every weight on its grid."""

from __future__ import annotations

import copy
import itertools
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import sparsebit
from models import sqnr
from sparsebit.quantization import QuantModel
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.modules.composite.recurrent import (
    QGRU,
    QLSTM,
    QRNN,
    QGRUCell,
    QLSTMCell,
    QRNNCell,
    QWeight,
)

I, H, N, T = 4, 6, 3, 5
CFG = {"BACKEND": "virtual", "W": {"QSCHEME": "per-channel-symmetric"}, "A": {"OBSERVER": {"TYPE": "minmax"}}}
LAYERS = {nn.LSTM: QLSTM, nn.GRU: QGRU, nn.RNN: QRNN}
CELLS = {nn.LSTMCell: QLSTMCell, nn.GRUCell: QGRUCell, nn.RNNCell: QRNNCell}

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The kernels here are tiny: two threads would mostly wait for each other, seconds on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(cls, **options):
    torch.manual_seed(0)
    return cls(I, H, **options).eval()


def options_of_layers():
    grid = itertools.product(LAYERS, (1, 2), (False, True), (False, True), (False, True))
    for cls, layers, both, first, bias in grid:
        yield cls, {"num_layers": layers, "bidirectional": both, "batch_first": first, "bias": bias}
    for layers, both, bias in itertools.product((1, 2), (False, True), (False, True)):
        yield nn.LSTM, {"num_layers": layers, "bidirectional": both, "bias": bias, "proj_size": 2}
    yield nn.RNN, {"nonlinearity": "relu", "num_layers": 2}


CASES = [pytest.param(cls, o, id=f"{cls.__name__}-{o}") for cls, o in options_of_layers()]
SHORT = [
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 2}),
    (nn.GRU, {"num_layers": 2, "batch_first": True}),
    (nn.RNN, {"bidirectional": True, "bias": False}),
]


def sequence(layer, batched=True, dtype=torch.float32):
    torch.manual_seed(1)
    x = torch.randn((N, T, I) if layer.batch_first else (T, N, I), dtype=dtype)
    return x if batched else x[0, :, :] if layer.batch_first else x[:, 0]


def states(layer, batched=True):
    torch.manual_seed(2)
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    h = torch.randn(rows, N, layer.proj_size or H)
    c = torch.randn(rows, N, H)
    h, c = (h, c) if batched else (h[:, 0], c[:, 0])
    return (h, c) if isinstance(layer, nn.LSTM) else h


def flat(output):
    """All tensors in what a recurrent layer returns."""
    if isinstance(output, PackedSequence):
        return [t for t in output if t is not None]
    return [output] if isinstance(output, torch.Tensor) else [t for part in output for t in flat(part)]


def assert_same(got, want, tol=1e-6):
    got, want = flat(got), flat(want)
    assert len(got) == len(want)
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=tol, atol=tol)


# -- float -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cls, options", CASES)
def test_float_output_of_every_option(cls, options):
    layer = make(cls, **options)
    qlayer = LAYERS[cls](layer)
    for batched in (True, False):
        x, hx = sequence(layer, batched), states(layer, batched)
        assert_same(qlayer(x), layer(x))
        assert_same(qlayer(x, hx), layer(x, hx))
        assert_same(qlayer(hx=hx, input=x), layer(x, hx))


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("cls, options", CASES)
def test_packed_sequences(cls, options, sort):
    layer = make(cls, **options)
    torch.manual_seed(1)
    lengths = (5, 3, 2) if sort else (3, 5, 2)
    x = pack_sequence([torch.randn(n, I) for n in lengths], enforce_sorted=sort)
    qlayer, hx = LAYERS[cls](layer), states(layer)
    got = qlayer(x, hx)
    assert isinstance(got[0], PackedSequence)
    assert_same(got, layer(x, hx))
    assert_same(qlayer(x), layer(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cls", CELLS)
def test_cells(cls, bias):
    cell = make(cls, bias=bias)
    qcell, x = CELLS[cls](cell), torch.randn(N, I)
    h = torch.randn(N, H)
    hx = (h, torch.randn(N, H)) if cls is nn.LSTMCell else h
    assert_same(qcell(x), cell(x))
    assert_same(qcell(x, hx), cell(x, hx))
    assert_same(qcell(x[0]), cell(x[0]))


def test_relu_cell():
    cell, x = make(nn.RNNCell, nonlinearity="relu"), torch.randn(N, I)
    assert_same(QRNNCell(cell)(x), cell(x))


def test_dropout_between_layers_in_training():
    layer = make(nn.LSTM, num_layers=3, dropout=0.5).train()
    qlayer, x = QLSTM(layer), sequence(layer)
    torch.manual_seed(3)
    want = layer(x)
    torch.manual_seed(3)
    assert_same(qlayer(x), want)
    qlayer.eval()
    assert torch.equal(qlayer(x)[0], qlayer(x)[0])


@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-12), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("cls, options", SHORT)
def test_other_dtypes(cls, options, dtype, tol):
    layer = make(cls, **options)
    qlayer = LAYERS[cls](copy.deepcopy(layer)).to(dtype)
    layer, x = layer.to(dtype), sequence(layer, dtype=dtype)
    assert all(p.dtype == dtype for p in qlayer.parameters())
    assert_same(qlayer(x), layer(x), tol)


def grads_of(module):
    """By the names of torch: a QWeight holds `weight_ih_l0` as `weight_ih_l0.weight`."""
    return {name.removesuffix(".weight"): p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("cls, options", SHORT)
def test_gradients(cls, options):
    layer = make(cls, **options).train()
    qlayer, x = LAYERS[cls](copy.deepcopy(layer)), sequence(layer)
    mine = []
    for module in (layer, qlayer):
        leaf = x.clone().requires_grad_()
        sum(t.square().sum() for t in flat(module(leaf))).backward()
        mine.append(leaf.grad)
    torch.testing.assert_close(mine[1], mine[0])
    want, got = grads_of(layer), grads_of(qlayer)
    assert got.keys() == want.keys()
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad)


# -- the module as an object -------------------------------------------------------------------------
@pytest.mark.parametrize("cls", [*LAYERS, *CELLS])
def test_every_weight_is_in_the_state_dict_once(cls):
    layer = make(cls)
    qlayer = (LAYERS | CELLS)[cls](layer)
    state = qlayer.state_dict()
    assert {name.removesuffix(".weight") for name in state} == set(layer.state_dict())
    assert len({t.data_ptr() for t in state.values()}) == len(state)
    other = (LAYERS | CELLS)[cls](cls(I, H).eval())
    x = torch.randn(T, I)
    assert not torch.equal(flat(other(x))[0], flat(layer(x))[0])
    other.load_state_dict(state)
    assert_same(other(x), layer(x))


@pytest.mark.parametrize("cls, options", SHORT)
def test_deepcopy_is_independent(cls, options):
    layer = make(cls, **options)
    qlayer, x = LAYERS[cls](layer), sequence(layer)
    want = flat(qlayer(x))[0].detach()
    twin = copy.deepcopy(copy.deepcopy(qlayer))
    assert torch.equal(flat(twin(x))[0], want)
    with torch.no_grad():
        twin.weight_hh_l0.weight.zero_()
    assert torch.equal(flat(qlayer(x))[0], want) and not torch.equal(flat(twin(x))[0], want)


def test_moved_and_assigned_weights_are_the_ones_used():
    layer = make(nn.GRU)
    qlayer, x = QGRU(copy.deepcopy(layer)), sequence(layer)
    qlayer.double().float().flatten_parameters()
    assert_same(qlayer(x), layer(x))
    new = {name: torch.zeros_like(t) for name, t in qlayer.state_dict().items()}
    qlayer.load_state_dict(new, assign=True)
    assert flat(qlayer(x))[0].abs().max() == 0
    qlayer.bias_ih_l0 = nn.Parameter(torch.ones(3 * H))
    assert flat(qlayer(x))[0].abs().max() > 0


def test_a_failing_call_changes_nothing():
    layer = make(nn.LSTM)
    qlayer, x = QLSTM(layer), sequence(layer)
    with pytest.raises(RuntimeError, match="input_size"):
        qlayer(x[..., :-1])
    with pytest.raises(ValueError, match="dtype"):
        qlayer(x.double())
    assert_same(qlayer(x), layer(x))


def test_parametrized_weights_are_taken_as_they_are():
    layer = make(nn.LSTM)
    nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    x = sequence(layer)
    with torch.no_grad():
        layer.parametrizations.weight_hh_l0.original0.mul_(2)
        want = layer(x)
    assert_same(QLSTM(layer)(x), want)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_weights_that_a_hook_computes():
    layer = make(nn.GRU)
    nn.utils.weight_norm(layer, "weight_hh_l0")
    x = sequence(layer)
    with torch.no_grad():
        layer.weight_hh_l0_g.mul_(2)
        qlayer = QGRU(layer)  # before torch has computed the new weight
        assert_same(qlayer(x), layer(x))
        assert not any(name.endswith(("_g", "_v")) for name in qlayer.state_dict())


# -- quantized ---------------------------------------------------------------------------------------
class Tagger(nn.Module):
    def __init__(self, layer, out):
        super().__init__()
        self.embed = nn.Embedding(20, I)
        self.rnn, self.head = layer, nn.Linear(out, 3)

    def forward(self, words):
        out, _ = self.rnn(self.embed(words))
        return self.head(out)


def tagger(cls, options):
    layer = make(cls, **options)
    width = (layer.proj_size or H) * (2 if layer.bidirectional else 1)
    return Tagger(layer, width).eval(), torch.randint(
        0, 20, (N, T), generator=torch.Generator().manual_seed(0)
    )


def weights_of(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, QWeight)}


def on_grid(values, quantizer):
    codes = values.double() / quantizer.scale.double().reshape(-1, 1)
    inside = codes.round().min() >= quantizer.spec.qmin and codes.round().max() <= quantizer.spec.qmax
    return bool((codes - codes.round()).abs().max() < 1e-3 and inside)


@pytest.mark.parametrize("cls, options", SHORT)
def test_quantized_in_a_model(cls, options):
    net, words = tagger(cls, options)
    qmodel = sparsebit.quantize(net, [words], CFG)
    weights = weights_of(qmodel)
    layers = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    assert len(weights) == layers * (3 if options.get("proj_size") else 2)
    with torch.no_grad():
        assert 20 < sqnr(net(words), qmodel(words)) < 80
        for name, weight in weights.items():
            assert weight.weight_quantizer.scale.shape == (len(weight.weight),), name
            assert on_grid(weight(), weight.weight_quantizer), name
            assert not on_grid(weight.weight, weight.weight_quantizer), name
        qmodel.set_quant(False, False)
        assert_same(qmodel(words), net(words))
    names = dict(qmodel.named_quantizers())
    assert {"rnn.input_quantizer", "rnn_weight_ih_l0.weight_quantizer"} <= set(names)


def test_the_kernel_gets_the_rounded_values(monkeypatch):
    net, words = tagger(nn.LSTM, {"num_layers": 2})
    qmodel = sparsebit.quantize(net, [words], CFG)
    seen, real = [], torch._VF.lstm
    monkeypatch.setattr(torch._VF, "lstm", lambda *args: seen.append(args) or real(*args))
    with torch.no_grad():
        qmodel(words)
    ((x, _, used, *_),) = seen
    layer = next(m for m in qmodel.modules() if isinstance(m, QLSTM))
    quantizer = layer.input_quantizer
    codes = x.double() / quantizer.scale.double() + quantizer.zero_point.double()
    assert (codes - codes.round()).abs().max() < 1e-3 and codes.round().unique().numel() > 10
    matrices = [w for w in used if w.dim() == 2]
    assert len(matrices) == 4 and len(used) == 8
    for matrix, weight in zip(matrices, weights_of(layer).values()):
        assert on_grid(matrix, weight.weight_quantizer)


@pytest.mark.parametrize("cls", CELLS)
def test_quantized_cell_in_a_loop(cls):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = make(cls)

        def forward(self, x):
            hx = None
            for step in range(T):
                hx = self.cell(x[:, step], hx)
            return hx[0] if isinstance(hx, tuple) or cls is nn.LSTMCell else hx

    net, x = Loop().eval(), torch.randn(N, T, I, generator=torch.Generator().manual_seed(0))
    qmodel = sparsebit.quantize(net, [x], CFG)
    assert len(weights_of(qmodel)) == 2
    with torch.no_grad():
        assert 20 < sqnr(net(x), qmodel(x)) < 80


def test_quantized_packed_sequence():
    """The quantizer sees the values of a packed sequence, and none of the padding."""
    layer = make(nn.GRU)
    qlayer = QGRU(layer)
    config = sparsebit.QuantConfig.load(CFG)
    torch.manual_seed(1)
    x = pack_sequence([torch.randn(n, I) + 3 for n in (5, 3, 2)])
    for module in qlayer.modules():
        if isinstance(module, QuantOpr):
            module.build_quantizer(config)
    qlayer.input_quantizer.update_observer(x.data)
    low = qlayer.input_quantizer.observer.seen_range()[0]
    qlayer.input_quantizer.calc_qparams()
    qlayer.set_quant(a_quant=True)
    got, want = qlayer(x)[0], layer(x)[0]
    assert low > 0 and 20 < sqnr(want.data, got.data) < 80
    assert torch.equal(got.batch_sizes, want.batch_sizes)


def test_saved_and_copied(tmp_path):
    net, words = tagger(nn.LSTM, {"bidirectional": True})
    qmodel = sparsebit.quantize(net, [words], CFG)
    with torch.no_grad():
        want = qmodel(words)
        assert torch.equal(copy.deepcopy(qmodel)(words), want)
        qmodel.save(tmp_path)
        assert torch.equal(QuantModel.load(tmp_path, net)(words), want)
        assert sqnr(want, qmodel.bfloat16()(words).float()) > 20


def test_asymmetric_calibration():
    net, words = tagger(nn.LSTM, {"num_layers": 2})
    qmodel = QuantModel(net, CFG).calibrate([words], asym=True)
    qmodel.set_quant(True, True)
    with torch.no_grad():
        assert 20 < sqnr(net(words), qmodel(words)) < 80
    assert all(w.weight_quantizer.calibrated for w in weights_of(qmodel).values())


def test_training_with_quantization_reaches_every_parameter():
    net, words = tagger(nn.LSTM, {"num_layers": 2, "proj_size": 2})
    qmodel = sparsebit.quantize(net, [words], CFG).train()
    qmodel(words).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in qmodel.parameters())


def test_calls_from_threads_do_not_see_each_other():
    net, words = tagger(nn.LSTM, {"num_layers": 2})
    qmodel = sparsebit.quantize(net, [words], CFG)
    layer, x = next(m for m in qmodel.modules() if isinstance(m, QLSTM)), torch.randn(T, N, I)
    with torch.no_grad():
        want = layer(x)[0]
    wrong = []

    def run():
        with torch.no_grad():
            wrong.extend(i for i in range(50) if not torch.equal(layer(x)[0], want))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
