"""Inputs that a graph does not have are refused; what is kept says why; the SparseModel and its compact form agree."""

from __future__ import annotations

import copy
import pickle
from typing import Optional

import pytest
import torch
from torch import Tensor, fx, nn

import sparsebit
from sparsebit.errors import TraceError
from sparsebit.sparse import SparseModel
from sparsebit.sparse.depth import shorten


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# -- inputs that the example did not have --------------------------------------------------------------
class Optionals(nn.Module):
    """The slice keeps the result a graph."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: Optional[Tensor] = None, times: int = 1):  # noqa: UP045
        h = torch.relu(self.a(x))[:, :8]
        for _ in range(times):
            h = h + 1
        return self.b(h if scale is None else h * scale)


X = torch.randn(2, 8)
PASSED_ON = {
    "as it is": lambda m: m,
    "copied": copy.deepcopy,
    "pickled": lambda m: pickle.loads(pickle.dumps(m)),
    "traced again": fx.symbolic_trace,
    "pruned again": lambda m: sparsebit.prune(m, X, ratio=0.25),
}


@pytest.mark.parametrize("way", PASSED_ON)
def test_the_pruned_graph_refuses_inputs_it_was_not_traced_with(way):
    small = PASSED_ON[way](sparsebit.prune(Optionals().eval(), X, ratio=0.25))
    assert torch.equal(small(X), small(X, None, times=1))
    with pytest.raises(TraceError, match=r"forward\(scale=...\)"):
        small(X, torch.zeros(1))
    with pytest.raises(TraceError, match="times=1"):
        small(X, times=3)


def test_the_sparse_model_refuses_them_too():
    model = Optionals().eval()
    for smodel in (
        SparseModel(model, None, X),
        SparseModel(model),
        copy.deepcopy(SparseModel(model, None, X)),
    ):
        assert torch.equal(smodel(X), model(X))
        with pytest.raises(TraceError, match="scale"):
            smodel(X, torch.zeros(1))
        with pytest.raises(TraceError, match="times"):
            smodel(X, None, 2)
    scale = torch.randn(1)
    known = SparseModel(model, None, (X, scale))
    torch.testing.assert_close(known(X, scale * 2), model(X, scale * 2))


def test_the_guard_is_scripted_traced_and_exported():
    torch.jit.script(Optionals())  # the original can be
    small = sparsebit.prune(Optionals().eval(), X, ratio=0.25)
    scripted = torch.jit.script(small)
    torch.testing.assert_close(scripted(X), small(X))
    for call in ((X, torch.zeros(1)), (X, None, 2)):
        with pytest.raises(Exception, match="another value"):
            scripted(*call)
    torch.testing.assert_close(torch.jit.trace(small, (X,))(X), small(X))
    torch.testing.assert_close(torch.export.export(small, (X,)).module()(X), small(X))


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x, key_padding_mask=None, steps=1, **more):
        for _ in range(steps):
            x = x + self.attention(x, x, x, key_padding_mask=key_padding_mask)[0]
        return self.head(x)


def test_masks_of_attention_are_not_lost():
    """The graph is traced twice here: torch's block is opened in between."""
    x, hidden = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    small = sparsebit.prune(Padded().eval(), x, ratio=0.5)
    assert small(x).shape == (2, 5, 3)
    for name, value in {"key_padding_mask": hidden, "steps": 2, "more": 1}.items():
        with pytest.raises(TraceError, match=name):
            small(x, **{name: value})
    masked = sparsebit.prune(Padded().eval(), (x, hidden), ratio=0.5)
    assert not torch.equal(masked(x, hidden), masked(x, hidden.index_fill(1, torch.tensor(0), True)))
    torch.export.export(small, (x,))


def test_a_graph_without_branches_has_the_guard_too():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x, scale=None):
            h = x + self.b(torch.relu(self.a(x)))
            return h if scale is None else h * scale

    x = torch.randn(64, 8)
    short = shorten(Residual().eval(), x, 1, [x])
    assert short(x).shape == x.shape
    with pytest.raises(TraceError, match="scale"):
        short(x, torch.zeros(1))
