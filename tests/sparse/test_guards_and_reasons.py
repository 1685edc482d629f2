"""Inputs that a graph does not have are refused; what is kept says why; the SparseModel and its compact form agree."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Optional

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, fx, nn

import sparsebit
from sparsebit.errors import TraceError
from sparsebit.sparse import SparseModel
from sparsebit.sparse.depth.shorten_branches import shorten


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


@pytest.mark.parametrize("way", ["as it is", "pickled", "pruned again"])
def test_an_optional_input_of_the_example_is_required(way):
    """Its default None is what the graph cannot take: whoever traces it again would put it there."""
    scale = torch.rand(1)
    again = {**PASSED_ON, "pruned again": lambda m: sparsebit.prune(m, (X, scale), ratio=0.25)}
    small = again[way](sparsebit.prune(Optionals().eval(), {"x": X, "scale": scale}, ratio=0.25))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'scale'"):
        small(X)
    with pytest.raises(TraceError, match="times=1"):
        small(X, scale, times=3)
    assert small(X, scale=scale).shape == (2, 4)
    quantized = sparsebit.QuantModel(small, {"BACKEND": "virtual"})
    assert not quantized.model.meta["islands"]
    torch.testing.assert_close(quantized(X, scale), small(X, scale))


def test_an_input_behind_one_that_is_left_out_stays_optional():
    class Two(Optionals):
        def forward(self, x, shift=None, scale=None):
            h = super().forward(x, scale)
            return h if shift is None else h + shift

    scale = torch.rand(1)
    small = sparsebit.prune(Two().eval(), {"x": X, "scale": scale}, ratio=0.25)
    assert small(X, scale=scale).shape == (2, 4)
    with pytest.raises(TraceError, match="shift"):
        small(X, scale, scale)
    with pytest.raises(TraceError, match=r"forward\(scale=...\): is missing"):
        small(X)


def test_an_optional_input_that_nothing_reads_stays_optional():
    class Trained(Optionals):
        def forward(self, x, labels=None):
            y = super().forward(x).view(-1, 4)
            return F.cross_entropy(y, labels) if self.training and labels is not None else y

    small = sparsebit.prune(Trained().eval(), {"x": X, "labels": torch.zeros(2, dtype=torch.long)}, 0.25)
    assert small(X).shape == (2, 4)


@pytest.mark.parametrize("more", [(), (torch.zeros(2, dtype=torch.long),)])
def test_batches_may_look_like_an_example_with_optional_inputs(more):
    scale = torch.rand(1)
    small = sparsebit.prune(
        Optionals().eval(), (X, scale), 0.25, batches=[(X, scale, *more)] * 2, progress=False
    )
    assert small(X, scale).shape == (2, 4)


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


# -- the masked model and the compact one --------------------------------------------------------------
def masked_and_compact(model, example, ratio=0.5):
    smodel = SparseModel(model.eval(), {"SPARSER": {"RATIO": ratio}}, example)
    smodel.calc_params()
    return smodel.eval(), smodel.compact().eval()


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.k = nn.Linear(8, 16), nn.Linear(8, 16)
        self.register_buffer("pos", torch.randn(1, 6, 16))

    def forward(self, x):
        return (self.a(x) + self.pos) @ (self.k(x) + self.pos).transpose(1, 2)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_buffers_are_masked_whatever_the_batch_size(batch):
    x = torch.randn(batch, 6, 8)
    smodel, small = masked_and_compact(Positions(), x)
    assert small.a.out_features == small.k.out_features == 8 and small.pos.shape == (1, 6, 8)
    torch.testing.assert_close(small(x), smodel(x))
    kept = smodel.model.a.w_mask.any(1)
    by_hand = copy.deepcopy(smodel._hidden["source"])
    for layer in (by_hand.a, by_hand.k):
        layer.weight.data[~kept], layer.bias.data[~kept] = 0, 0
    by_hand.pos[..., ~kept] = 0
    torch.testing.assert_close(small(x), by_hand(x))
    smodel.reset_masks()
    torch.testing.assert_close(smodel(x), smodel._hidden["source"](x))


def test_buffers_of_the_user_that_are_called_masks_stay():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
            self.gate = nn.Parameter(torch.randn(16))
            self.register_buffer("gate_mask", torch.randn(16))
            self.register_buffer("attn_mask", torch.randn(16))

        def forward(self, x):
            return self.b(self.a(x) * self.gate * self.gate_mask + self.attn_mask)

    model = Masked().eval()
    smodel, _ = masked_and_compact(model, X, 0.0)
    torch.testing.assert_close(smodel(X), model(X))
    smodel, small = masked_and_compact(model, X)
    assert small.a.out_features == 8
    torch.testing.assert_close(small(X), smodel(X))


# -- weights that hooks compute ------------------------------------------------------------------------
def masks(layer):
    nn.utils.prune.l1_unstructured(layer, "weight", 0.3)
    nn.utils.prune.random_unstructured(layer, "weight", 0.2)
    nn.utils.prune.random_unstructured(layer, "bias", 0.2)


@pytest.mark.parametrize("hook", [masks, nn.utils.spectral_norm, nn.utils.weight_norm])
def test_hooks_that_compute_weights(hook):
    x = torch.randn(2, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4)).eval()
    hook(model[2])
    model(x).sum().backward()  # leaves a weight with a history behind
    names = list(model.state_dict())
    torch.testing.assert_close(SparseModel(model, None, x)(x), model(x))
    smodel, small = masked_and_compact(model, x)
    assert small[2].weight.shape == (6, 8)
    torch.testing.assert_close(small(x), smodel(x))
    torch.testing.assert_close(copy.deepcopy(smodel)(x), smodel(x))
    small.load_state_dict(small.state_dict())
    fresh = small.pruning_plan.apply(model)
    fresh.load_state_dict(small.state_dict())
    torch.testing.assert_close(fresh(x), small(x))
    assert list(model.state_dict()) == names


# -- weights of functions ------------------------------------------------------------------------------
class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 4))

    def forward(self, x):
        return torch.relu(x @ self.w1) @ self.w2


class Functions(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(4, 16))

    def forward(self, x):
        return nn.functional.linear(torch.relu(nn.functional.linear(x, self.w1)), self.w2)


@pytest.mark.parametrize("make", [Products, Functions])
def test_weights_of_functions_are_there_once(make):
    count = lambda values: sum(v.numel() for v in values)
    model = make().eval()
    smodel, small = masked_and_compact(model, X)
    assert count(small.state_dict().values()) == count(small.parameters()) == (8 * 16 + 16 * 4) // 2
    torch.testing.assert_close(small(X), smodel(X))
    fresh = small.pruning_plan.apply(model)
    fresh.load_state_dict(small.state_dict())
    torch.testing.assert_close(fresh(X), small(X))
    assert count(sparsebit.prune(model, X, params=0.5).parameters()) == count(small.parameters())


# -- reasons -------------------------------------------------------------------------------------------
class Control(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(self.a(x + 1 if x.sum() > 0 else x))


class Integers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("k", torch.arange(16))

    def forward(self, x):
        return self.b(self.a(x) * self.k)


class FirstState(nn.Module):
    """Its size is that of the input, twice."""

    def __init__(self):
        super().__init__()
        self.rnn, self.b = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(self.rnn(x[:, None], torch.zeros(1, x.shape[0], 2 * x.shape[1]))[0])


class PooledChannels(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(nn.functional.avg_pool1d(self.a(x)[:, None], 2))


class Largest(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.a(x)
        value, place = h.max(-1, keepdim=True)
        return self.b(h * value) + place


def parametrized(how):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    how(model[0])
    return model


KEPT = {
    "island": (Control, r"the model: was not traced.*control flow"),
    "an island inside": (
        lambda: nn.Sequential(Control(), nn.Linear(4, 4)),
        r"0: was not traced.*control flow",
    ),
    "weight norm": (lambda: parametrized(nn.utils.parametrizations.weight_norm), r"0.*weight is computed"),
    "spectral norm": (
        lambda: parametrized(nn.utils.parametrizations.spectral_norm),
        r"0.*weight is computed",
    ),
    "pooled channels": (PooledChannels, r"avg_pool1d: the 16 channels of a go together"),
    "the place of the largest": (Largest, r"max: no rule for max called like this"),
    "integers": (Integers, r"mul: channels meet"),
    "a first state": (FirstState, r"rnn: channels meet"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_says_why(name):
    make, why = KEPT[name]
    model = make().eval()
    small = sparsebit.prune(model, X, ratio=0.5)
    torch.testing.assert_close(small(X), model(X))
    found = [r for r in small.pruning_plan.reasons if re.search(why, r)]
    assert found, small.pruning_plan.reasons
    assert f"kept: {found[0]}" in str(small.pruning_plan)


def test_asking_a_weight_for_its_type_fixes_nothing():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            x = x.to(self.a.weight.dtype).to(self.a.weight.device)
            return self.b(self.a(x).view(-1, self.a.weight.shape[0]))

    smodel, small = masked_and_compact(Asks(), X)
    assert small.a.out_features == 8
    torch.testing.assert_close(small(X), smodel(X))


# -- torch's own attention -----------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_opens_in_any_precision(dtype):
    model, x = Padded().eval().to(dtype), 3 * torch.randn(2, 7, 16).to(dtype)
    small = sparsebit.prune(model, x, ratio=0.5)
    weights = {k: v for k, v in small.state_dict().items() if "q_proj.weight" in k}
    assert [tuple(w.shape) for w in weights.values()] == [(8, 16)], small.pruning_plan.reasons


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x, mask, padding):
        return self.head(self.encoder(x, mask, padding))


@pytest.mark.parametrize("rank", [2, 3])
def test_attention_with_masks_scripts(rank):
    x, padding = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    padding[:, -1] = True
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    mask = mask if rank == 2 else mask.expand(8, 5, 5)
    model = Encoder().eval()
    torch.jit.script(model)  # the original can be
    smodel, small = masked_and_compact(model, (x, mask, padding))
    assert sum(p.numel() for p in small.parameters()) < 0.8 * sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(small(x, mask, padding), smodel(x, mask, padding))
    torch.testing.assert_close(torch.jit.script(small)(x, mask, padding), small(x, mask, padding))
