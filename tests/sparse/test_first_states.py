"""Recurrent layers whose first state is made in forward: the size that is written there follows the channels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsebit.sparse import SparseModel

STATES = {
    "zeros": lambda m, x: torch.zeros(m.n, x.size(0), 32),
    "tuple": lambda m, x: torch.zeros((m.n, x.size(0), 32), dtype=x.dtype),
    "size=": lambda m, x: torch.zeros(size=(m.n, x.size(0), 32)),
    "to": lambda m, x: torch.zeros(m.n, x.size(0), 32).to(x.device).requires_grad_(),
    "ones": lambda m, x: torch.ones(m.n, x.shape[0], 32, device=x.device),
    "new_zeros": lambda m, x: x.new_zeros(m.n, x.size(0), 32),
    "new_zeros of a tuple": lambda m, x: x.new_zeros((m.n, x.size(0), 32)),
    "attribute": lambda m, x: torch.zeros(m.n, x.size(0), m.layer.hidden_size),
}


class Net(nn.Module):
    def __init__(self, kind, state, **options):
        super().__init__()
        self.first, self.layer = nn.Linear(8, 16), kind(16, 32, 2, batch_first=True, **options)
        self.n, self.state = 4 if self.layer.bidirectional else 2, state
        self.head = nn.Linear(64 if self.layer.bidirectional else 32, 3)

    def forward(self, x):
        x = self.first(x)
        state = self.state(self, x)
        out, _ = self.layer(x, (state, self.state(self, x)) if isinstance(self.layer, nn.LSTM) else state)
        return self.head(out[:, -1])


def check(model: nn.Module) -> nn.Module:
    """Half of the hidden units go, and what is left computes what the masked model computes."""
    smodel = SparseModel(model, {"SPARSER": {"RATIO": 0.5}}, torch.randn(2, 5, 8)).eval()
    smodel.calc_params()
    small, x = smodel.compact(), torch.randn(3, 7, 8)
    torch.testing.assert_close(small(x), smodel(x), rtol=1e-4, atol=1e-5)
    assert small.get_submodule("layer").hidden_size == 16
    return small


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_hidden_size_is_cut(kind, state):
    torch.manual_seed(0)
    small = check(Net(kind, STATES[state]).eval())
    assert (type(small) is Net) is (state == "attribute")  # no size of its own


def test_of_both_directions():
    torch.manual_seed(0)
    check(Net(nn.LSTM, STATES["to"], bidirectional=True).eval())


@pytest.mark.parametrize(
    "add",
    [
        lambda h: h + torch.zeros(h.shape[0], 16),
        lambda h: h + h.new_zeros(()),
        lambda h: h + torch.ones(h.shape[0], 1),
        lambda h: torch.cat([h[:, :8], torch.zeros(h.shape[0], 8)], 1),
    ],
)
def test_what_is_made_meets_other_channels(add):
    class Meets(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x):
            return self.b(add(torch.relu(self.a(x))))

    torch.manual_seed(0)
    smodel = SparseModel(Meets().eval(), {"SPARSER": {"RATIO": 0.5}}, torch.randn(2, 8))
    smodel.calc_params()
    small, x = smodel.compact(), torch.randn(5, 8)
    torch.testing.assert_close(small(x), smodel(x), rtol=1e-4, atol=1e-5)
    assert small.get_submodule("a").out_features < 16
