"""MACs against hand formulas, what counts as quantized, memory of one forward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models import Attention, images, small_net
from sparsebit.quantization import QuantModel
from sparsebit.quantization.analysis.costs import macs_quantized, measure
from sparsebit.quantization.quantizers import Mode, Quantizer

W_ONLY = {"BACKEND": "virtual", "A": {"QUANTIZER": {"DISABLE": True}}}


def test_a_convolutional_net():
    x = images(1)[0]  # (4, 3, 12, 12)
    conv, depthwise = 8 * 8 * 9, 8 * 9
    expected = 4 * (144 * (3 * 8 * 9 + 2 * conv + 2 * depthwise) + 32 * 10)
    assert macs_quantized(QuantModel(small_net(), "w8a8"), x) == (expected, expected)
    assert macs_quantized(QuantModel(small_net(), W_ONLY), x) == (0, expected)


def test_an_attention_block():
    batch, tokens, dim = 2, 6, 16
    linear, matmul = batch * tokens * dim * dim * 4, 2 * batch * tokens * tokens * dim
    x = torch.randn(batch, tokens, dim)
    assert macs_quantized(QuantModel(Attention(), "w8a8"), x) == (linear + matmul, linear + matmul)
    off = {"BACKEND": "virtual", "A": {"SPECIFIC": [{"matmul_1_identity1": ["QUANTIZER.DISABLE", True]}]}}
    assert macs_quantized(QuantModel(Attention(), off), x) == (linear + matmul // 2, linear + matmul)


class Skipped(nn.Module):
    """The float layer reads the very value that the quantized one quantizes."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(8, 4)

    def forward(self, x):
        return self.a(x).sum() + self.b(x).sum()


@pytest.mark.parametrize("order", ["a", "b"])
def test_a_value_that_one_reader_quantizes_is_float_for_the_others(order):
    qmodel = QuantModel(Skipped(), {"BACKEND": "virtual", "SKIP_TRACE_MODULES": [order]})
    quantized = {"a": 8 * 4, "b": 8 * 16}[order]
    assert macs_quantized(qmodel, torch.randn(3, 8)) == (3 * quantized, 3 * 8 * 20)


class Forms(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        x = F.linear(x, self.weight)  # 64 per token
        x = self.mha(x, x, x, need_weights=False)[0]  # 256 per token, and 2 * tokens * 8
        x = self.gru(x)[0]  # 3 * 64 on the input, the same on the hidden state
        x = self.lstm(x)[0]  # 4 * 64, and the same
        return F.scaled_dot_product_attention(x, x, x)  # 2 * tokens * 8


def test_layers_made_of_layers_and_fused_ops():
    tokens, batch = 5, 2
    attention = 2 * tokens * 8
    per_token = 64 + 256 + attention + 3 * 128 + 4 * 128 + attention
    hidden = 3 * 64 + 4 * 64  # the state of a recurrent layer is float
    quantized, total = macs_quantized(QuantModel(Forms().eval(), "w8a8"), torch.randn(batch, tokens, 8))
    first_state = batch * 3 * 64  # zeros: what the GRU computes of them is constant, and has no MACs
    assert total == batch * tokens * per_token - first_state
    fused = batch * tokens * attention  # how much of the fused op counts is the op's business
    assert batch * tokens * (per_token - hidden) - fused <= quantized <= batch * tokens * (per_token - hidden)


class Stubborn(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else self.fc(x) @ torch.ones(8, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.stubborn = nn.Linear(8, 8), Stubborn()

    def forward(self, x):
        return self.stubborn(self.head(x))


@pytest.mark.parametrize(
    ("model", "sign", "extra"), [(Net, 1, 0), (Net, -1, 64), (Stubborn, 1, 0), (Stubborn, -1, 64)]
)
def test_islands(model, sign, extra):
    """The layers inside an island are quantized, the multiplications of its own code are not."""
    net = model().eval()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.eye(8) if p.dim() == 2 else 0 * p)
    layers = 2 * 64 if model is Net else 64
    found = macs_quantized(QuantModel(net, "w8a8"), sign * torch.ones(2, 8))
    assert found == (2 * layers, 2 * (layers + extra))


def test_nothing_is_left_behind():
    qmodel = QuantModel(small_net().train(), "w8a8").calibrate(images(1))
    qmodel.train()
    qmodel.set_quant(w_quant=True, a_quant=False)
    before = {name: value.clone() for name, value in qmodel.state_dict().items()}
    modes = [m.mode for m in qmodel.modules() if isinstance(m, Quantizer)]
    for x in (images(1)[0], "not a tensor"):
        try:
            macs_quantized(qmodel, x)
        except Exception:
            assert x == "not a tensor"
        assert [m.mode for m in qmodel.modules() if isinstance(m, Quantizer)] == modes
        assert {Mode.QUANT, Mode.FLOAT} >= set(modes) and all(m.training for m in qmodel.modules())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in qmodel.modules())
    for name, value in qmodel.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_peak_memory_counts_what_lives_at_once():
    class Three(nn.Module):
        def forward(self, x):
            a = torch.sigmoid(x)
            b = a + 1
            c = a * b
            del a, b
            return (c + 1).sum()

    n = 1 << 16
    assert measure(QuantModel(Three(), "w8a8"), torch.randn(n)).peak == 3 * 4 * n


def test_observers_that_keep_every_batch_are_named():
    from sparsebit.quantization.observers import OBSERVERS_MAP, Observer, register_observer

    @register_observer
    class Keeper(Observer):
        TYPE = "keeper_of_costs"

        def calc_minmax(self):
            return self.seen_range()

    try:
        kept = QuantModel(
            nn.Linear(8, 8), {"BACKEND": "virtual", "A": {"OBSERVER": {"TYPE": "keeper_of_costs"}}}
        )
        assert measure(kept, torch.randn(100, 8)).cached == 100 * 8 * 4
    finally:
        del OBSERVERS_MAP._items["keeper_of_costs"]
    assert measure(QuantModel(nn.Linear(8, 8), "w8a8"), torch.randn(100, 8)).cached == 0


def test_the_float_state_of_an_lstm_is_not_quantized():
    measured = measure(QuantModel(nn.LSTM(8, 6, batch_first=True), "w8a8"), torch.randn(2, 5, 8))
    assert sum(measured.quantized.values()) == 2 * 5 * 4 * 6 * 8
    assert sum(measured.macs.values()) == 2 * 5 * 4 * 6 * (8 + 6)
